# TLT on NVIDIA GPUs. The wheels of torch and vLLM bring the CUDA libraries; the host needs the
# driver and the NVIDIA container toolkit.
# Never built, and never run on a GPU. tests/unit/test_forge_files.py checks the steps.
#
#   docker build -f docker/cuda.Dockerfile -t tlt-cuda .
#   docker run --rm --gpus all --shm-size=64g tlt-cuda tlt doctor --gpu --out /tmp/tlt-doctor.json
FROM python:3.12-slim-bookworm

# Triton calls a C compiler; KubeRay asks a node for its health with wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/tlt
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY configs configs
# Into the image's own Python: KubeRay starts `ray` from a login shell, which resets PATH.
RUN pip install '.[gpu,train,metrics,simulate]'

RUN useradd --create-home --uid 1000 tlt && install --directory --owner=tlt /work /work/runs
USER tlt
WORKDIR /work
CMD ["tlt", "doctor"]
