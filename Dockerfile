# docker build -t secateur . && docker run --rm secateur        the demo: fetches a model from the Python registry and prunes it
# docker run --rm -v "$PWD:/data" secateur .venv/bin/secateur prune /data/MODEL -o /data/small
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /secateur
COPY . .
# constraints.txt holds torch at one version; this index has it for the CPU alone.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
RUN make install
CMD ["make", "demo"]
