# TLT on CPU cores: the locked environment of `make setup-locked`, for trying TLT and for tests.
# Never built: no Docker daemon was at hand. tests/unit/test_forge_files.py checks the steps.
#
#   docker build -f docker/cpu.Dockerfile -t tlt-cpu --build-arg PIP_EXTRA_INDEX_URL=... .
#   docker run --rm --cpus=2 --shm-size=2g -v "$PWD/runs:/work/runs" tlt-cpu tlt demo
#
# PIP_EXTRA_INDEX_URL is the index of PyTorch's CPU wheels; docs/install.md says where to find it.
FROM python:3.11-slim-bookworm

# vLLM's CPU kernels load libnuma; compiled engines call a C++ compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/tlt
COPY Makefile pyproject.toml requirements-cpu.lock README.md LICENSE ./
COPY src src
COPY configs configs
RUN make setup-locked VENV=/opt/tlt/.venv

RUN useradd --create-home --uid 1000 tlt && install --directory --owner=tlt /work /work/runs
USER tlt
WORKDIR /work
ENV PATH=/opt/tlt/.venv/bin:$PATH
CMD ["tlt", "doctor"]
