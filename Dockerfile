# The command alone:     docker build -t rmetric .
# With a GPU's training: docker build --build-arg BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime \
#                            --build-arg EXTRAS=[live,guard,diagnosis,plot] -t rmetric:cuda .
ARG BASE=python:3.12-slim
# hadolint ignore=DL3006
FROM ${BASE}
ARG EXTRAS=[plot,diagnosis]
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY rmetric rmetric
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".${EXTRAS}" && rm -rf /src/* && useradd --uid 10001 rmetric
USER 10001
WORKDIR /work
ENTRYPOINT ["rmetric"]
CMD ["--help"]
