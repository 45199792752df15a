# syntax=docker/dockerfile:1
# docker build --target operator -t springtide/operator:0.1.0 .   the operator, and each job's coordinator: no torch
# docker build --target worker   -t springtide/worker:0.1.0 .     training; on CUDA: --build-arg BASE=AN-IMAGE-WITH-TORCH
# docker build --target all      -t springtide/all:0.1.0 .        everything in one image, for end-to-end tests
# docker build --target ps       -t springtide/ps:0.1.0 .         parameter servers
#
# For several platforms: docker buildx build --platform linux/amd64,linux/arm64 ... (no step depends on the platform).
# Another package index: --build-arg PIP_INDEX_URL=... ; for torch's CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG BASE=${PYTHON_IMAGE}

FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
# Dependencies of each image, read from pyproject.toml, so that a change of code leaves their layers as they are.
COPY deploy/requirements.py ./
RUN mkdir /requirements && python requirements.py /requirements
COPY operator operator
COPY worker worker
COPY ps ps
COPY deploy deploy
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS slim
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="Springtide" \
      org.opencontainers.image.description="Elastic PyTorch training on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PROMETHEUS_DISABLE_CREATED_SERIES=true
RUN groupadd --gid 65532 springtide && useradd --uid 65532 --gid 65532 --create-home --shell /usr/sbin/nologin springtide
COPY constraints.txt /opt/springtide/constraints.txt
WORKDIR /springtide

FROM slim AS operator
COPY --from=wheel /requirements/operator.txt /opt/springtide/requirements.txt
RUN pip install --no-cache-dir -c /opt/springtide/constraints.txt -r /opt/springtide/requirements.txt
COPY --from=wheel /wheels /opt/springtide/wheels
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl
USER 65532:65532
CMD ["python", "-m", "springtide_operator"]

FROM slim AS ps
COPY --from=wheel /requirements/ps.txt /opt/springtide/requirements.txt
RUN pip install --no-cache-dir -c /opt/springtide/constraints.txt -r /opt/springtide/requirements.txt
COPY --from=wheel /wheels /opt/springtide/wheels
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl
USER 65532:65532
CMD ["python", "-m", "springtide_ps"]

FROM slim AS all
COPY --from=wheel /requirements/all.txt /opt/springtide/requirements.txt
RUN pip install --no-cache-dir -c /opt/springtide/constraints.txt -r /opt/springtide/requirements.txt scikit-learn
COPY --from=wheel /wheels /opt/springtide/wheels
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl
COPY examples examples
USER 65532:65532
CMD ["springtide", "--help"]

FROM ${BASE} AS worker
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="Springtide worker" \
      org.opencontainers.image.description="Elastic PyTorch training on Kubernetes: the image of workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PROMETHEUS_DISABLE_CREATED_SERIES=true \
    PIP_BREAK_SYSTEM_PACKAGES=1
COPY constraints.txt /opt/springtide/constraints.txt
COPY --from=wheel /requirements/worker.txt /opt/springtide/requirements.txt
# A torch that the base image brings becomes the constraint, so that pip leaves it alone; its companions follow it.
RUN if python -c "import torch" 2>/dev/null; then \
        python -c "from importlib.metadata import version; print(f'torch=={version(\"torch\")}\nnumpy=={version(\"numpy\")}')" \
            > /opt/springtide/constraints.txt; \
    fi; \
    pip install --no-cache-dir -c /opt/springtide/constraints.txt -r /opt/springtide/requirements.txt scikit-learn
COPY --from=wheel /wheels /opt/springtide/wheels
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl
WORKDIR /springtide
COPY examples examples
RUN getent group 65532 || groupadd --gid 65532 springtide; \
    getent passwd 65532 || useradd --uid 65532 --gid 65532 --create-home --shell /usr/sbin/nologin springtide
USER 65532:65532
CMD ["python"]
