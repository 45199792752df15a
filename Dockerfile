# docker build --target operator     -t springtide/operator:0.1.0 .   the operator, and each job's coordinator: no torch
# docker build --target worker       -t springtide/worker:0.1.0 .     training, with the examples in the last layers; on
#                                                                     CUDA: --build-arg BASE=AN-IMAGE-WITH-TORCH@sha256:...
# docker build --target worker-plain -t YOUR/worker .                 the same without examples and scikit-learn
# docker build --target ps           -t springtide/ps:0.1.0 .         parameter servers
# docker build --target all          -t springtide/all:0.1.0 .        everything in one image, for end-to-end tests
#
# Nothing is taken that is not pinned: base images by digest, distributions by the hashes in deploy/locks/ (`make lock`),
# wheels only. For several platforms: docker buildx build --platform linux/amd64,linux/arm64 ...
# Another package index: --build-arg PIP_INDEX_URL=... (the hashes stay). Other builds of torch, e.g. for CPUs: see
# docs/supply-chain.md for TORCH_LOCK and TORCH_INDEX_URL.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG BASE=${PYTHON_IMAGE}

FROM ${PYTHON_IMAGE} AS wheel
ARG PYTHON_IMAGE
ARG BASE
ARG UNPINNED_BASE=""
ARG PIP_INDEX_URL=""
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY deploy/requirements.py ./
COPY deploy/locks locks
RUN python requirements.py base "${PYTHON_IMAGE}" "${UNPINNED_BASE}" && python requirements.py base "${BASE}" "${UNPINNED_BASE}"
# What each image needs, from the lock: a change of code or of another image leaves its layers as they are.
RUN mkdir /requirements && python requirements.py write /requirements locks/images.txt
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /requirements/build.txt
COPY protocol protocol
COPY operator operator
COPY worker worker
COPY ps ps
COPY deploy deploy
RUN pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS slim
ARG PIP_INDEX_URL=""
ARG VERSION=0.1.0
ARG REVISION=""
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.title="Springtide" \
      org.opencontainers.image.description="Elastic PyTorch training on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PROMETHEUS_DISABLE_CREATED_SERIES=true
RUN groupadd --gid 65532 springtide && useradd --uid 65532 --gid 65532 --create-home --shell /usr/sbin/nologin springtide
COPY deploy/sbom.py deploy/requirements.py /opt/springtide/
COPY --from=wheel /requirements/sbom.txt /opt/springtide/sbom.txt
WORKDIR /springtide

FROM slim AS operator
COPY --from=wheel /requirements/operator.txt /opt/springtide/requirements.txt
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/springtide/requirements.txt
COPY --from=wheel /wheels /opt/springtide/wheels
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl \
    && pip install --no-index --dry-run --quiet "springtide[operator,otel]"
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes --target /tmp/sbom -r /opt/springtide/sbom.txt \
    && python /opt/springtide/sbom.py image operator --library /tmp/sbom --out /opt/springtide/sbom && rm -rf /tmp/sbom
USER 65532:65532
CMD ["python", "-m", "springtide_operator"]

# torch from its own lock, by its own index where one is named, and what it needs.
FROM slim AS torch
ARG TORCH_LOCK=deploy/locks/torch.txt
ARG TORCH_INDEX_URL=""
COPY ${TORCH_LOCK} /opt/springtide/torch.txt
RUN PIP_INDEX_URL="${TORCH_INDEX_URL:-${PIP_INDEX_URL}}" \
    pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/springtide/torch.txt

FROM torch AS ps
COPY --from=wheel /requirements/ps.txt /requirements/ps-torch.txt /opt/springtide/
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/springtide/ps.txt -r /opt/springtide/ps-torch.txt
COPY --from=wheel /wheels /opt/springtide/wheels
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl \
    && pip install --no-index --dry-run --quiet "springtide[ps,otel]"
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes --target /tmp/sbom -r /opt/springtide/sbom.txt \
    && python /opt/springtide/sbom.py image ps --library /tmp/sbom --out /opt/springtide/sbom && rm -rf /tmp/sbom
USER 65532:65532
CMD ["python", "-m", "springtide_ps"]

FROM torch AS all
COPY --from=wheel /requirements/all.txt /requirements/all-torch.txt /requirements/examples.txt /opt/springtide/
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/springtide/all.txt \
        -r /opt/springtide/all-torch.txt -r /opt/springtide/examples.txt
COPY --from=wheel /wheels /opt/springtide/wheels
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl \
    && pip install --no-index --dry-run --quiet "springtide[operator,worker,ps,local,otel,examples]"
COPY examples examples
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes --target /tmp/sbom -r /opt/springtide/sbom.txt \
    && python /opt/springtide/sbom.py image all --library /tmp/sbom --out /opt/springtide/sbom && rm -rf /tmp/sbom
USER 65532:65532
CMD ["springtide", "--help"]

# The worker library and what it needs. A base that brings torch keeps it, and its numpy; all else is the lock's.
FROM ${BASE} AS worker-base
ARG PIP_INDEX_URL=""
ARG VERSION=0.1.0
ARG REVISION=""
ARG BASE
LABEL org.opencontainers.image.title="Springtide worker" \
      org.opencontainers.image.description="Elastic PyTorch training on Kubernetes: the image of workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PROMETHEUS_DISABLE_CREATED_SERIES=true \
    PIP_BREAK_SYSTEM_PACKAGES=1
ARG TORCH_LOCK=deploy/locks/torch.txt
ARG TORCH_INDEX_URL=""
COPY ${TORCH_LOCK} /opt/springtide/torch.txt
COPY --from=wheel /requirements/worker.txt /requirements/worker-torch.txt /requirements/examples.txt /requirements/sbom.txt /opt/springtide/
COPY deploy/sbom.py deploy/requirements.py /opt/springtide/
RUN if python -c "import torch" 2>/dev/null; then \
        python /opt/springtide/requirements.py keep numpy /opt/springtide/worker.txt; \
        : > /opt/springtide/worker-torch.txt; \
    else \
        PIP_INDEX_URL="${TORCH_INDEX_URL:-${PIP_INDEX_URL}}" \
        pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/springtide/torch.txt; \
    fi; \
    pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/springtide/worker.txt -r /opt/springtide/worker-torch.txt
COPY --from=wheel /wheels /opt/springtide/wheels
# The second one installs nothing: it ends the build where the base's torch or numpy is not what the worker needs.
RUN pip install --no-cache-dir --no-index --no-deps /opt/springtide/wheels/springtide-*.whl \
    && pip install --no-index --dry-run --quiet "springtide[worker,otel]"
WORKDIR /springtide
RUN getent group 65532 || groupadd --gid 65532 springtide; \
    getent passwd 65532 || useradd --uid 65532 --gid 65532 --create-home --shell /usr/sbin/nologin springtide

FROM worker-base AS worker-plain
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes --target /tmp/sbom -r /opt/springtide/sbom.txt \
    && python /opt/springtide/sbom.py image worker-plain --library /tmp/sbom --out /opt/springtide/sbom && rm -rf /tmp/sbom
USER 65532:65532
CMD ["python"]

FROM worker-base AS worker
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/springtide/examples.txt
COPY examples examples
RUN pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes --target /tmp/sbom -r /opt/springtide/sbom.txt \
    && python /opt/springtide/sbom.py image worker --library /tmp/sbom --out /opt/springtide/sbom && rm -rf /tmp/sbom
USER 65532:65532
CMD ["python"]
