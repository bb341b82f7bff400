# The CPU image:  docker build -t megasnn .
# The CUDA image: docker build -t megasnn --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# Both commands:  docker run --rm megasnn bash scripts/pretrain_spikformer_tp2_pp2.sh
#                 docker run --rm megasnn bash scripts/test.sh
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends git gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /megasnn
COPY . .
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -e ".[test]"
CMD ["bash", "scripts/pretrain_spikformer_tp2_pp2.sh"]
