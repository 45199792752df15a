# syntax=docker/dockerfile:1
# docker build --target operator -t springtide/operator:0.1.0 .     the operator, and each job's coordinator: no torch
# docker build --target ps       -t springtide/ps:0.1.0 .           parameter servers
# docker build --target worker   -t springtide/worker:0.1.0 .       training; with CUDA: --build-arg BASE=<an image with torch>
# docker build --target all      -t springtide/all:0.1.0 .          everything in one image, for end-to-end tests
# Workers: a base image that already has torch keeps its own.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG BASE=${PYTHON_IMAGE}

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
COPY worker worker
COPY ps ps
COPY deploy deploy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS slim
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PROMETHEUS_DISABLE_CREATED_SERIES=true
RUN useradd --uid 65532 --create-home --shell /usr/sbin/nologin springtide
COPY constraints.txt /opt/springtide/constraints.txt
WORKDIR /springtide

FROM slim AS operator
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /opt/springtide/constraints.txt "$(echo /wheels/springtide-*.whl)[operator]"
USER 65532:65532
CMD ["python", "-m", "springtide_operator"]

FROM slim AS ps
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /opt/springtide/constraints.txt "$(echo /wheels/springtide-*.whl)[ps]"
USER 65532:65532
CMD ["python", "-m", "springtide_ps"]

FROM slim AS all
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /opt/springtide/constraints.txt "$(echo /wheels/springtide-*.whl)[operator,worker,ps,local]" scikit-learn
COPY examples examples
USER 65532:65532
CMD ["springtide", "--help"]

FROM ${BASE} AS worker
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PROMETHEUS_DISABLE_CREATED_SERIES=true PIP_BREAK_SYSTEM_PACKAGES=1
COPY constraints.txt /opt/springtide/constraints.txt
# An installed torch becomes the constraint, so that pip leaves it alone; its companions then follow torch, not our list.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    if python -c "import torch" 2>/dev/null; then \
        python -c "import torch, numpy; print(f'torch=={torch.__version__}\nnumpy=={numpy.__version__}')" > /tmp/constraints.txt; \
    else cp /opt/springtide/constraints.txt /tmp/constraints.txt; fi; \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/springtide-*.whl)[worker]" scikit-learn; \
    rm /tmp/constraints.txt
WORKDIR /springtide
COPY examples examples
RUN id -u 65532 >/dev/null 2>&1 || useradd --uid 65532 --create-home --shell /usr/sbin/nologin springtide
USER 65532:65532
CMD ["python"]
