# tailorfl on a CPU, with the versions that the tests run with. How to build and use it: docs/installation.md.
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# Where a CPU build of PyTorch lies; without it, pip takes one with CUDA libraries of several gigabytes.
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/tailorfl \
    && /opt/tailorfl/bin/python -m pip install --no-cache-dir --constraint constraints.txt '.[deploy]'

FROM python:3.11-slim
COPY --from=build /opt/tailorfl /opt/tailorfl
ENV PATH=/opt/tailorfl/bin:$PATH PYTHONHASHSEED=0 MPLCONFIGDIR=/tmp/matplotlib
RUN useradd --uid 1000 --create-home tailorfl && mkdir /experiments && chown tailorfl /experiments
USER 1000
WORKDIR /experiments
ENTRYPOINT ["tailorfl"]
CMD ["--help"]
