# specbench with CUDA. The wheel of torch brings CUDA; the host needs a driver and the NVIDIA container toolkit.
#   docker build -t specbench .
#   docker run --gpus all --rm -v "$PWD/runs:/specbench/runs" specbench run method=cool_sd delta=1.1 n=16
FROM python:3.12-slim
# git: rows name their commit. gcc: Triton compiles a launcher on the host.
RUN apt-get update && apt-get install -y --no-install-recommends gcc git libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /specbench
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY specbench/storage/package.py specbench/storage/package.py
RUN pip install --no-cache-dir --constraint constraints.txt uv \
 && uv pip compile --quiet --constraint constraints.txt --extra metrics --extra ray pyproject.toml -o /tmp/requirements.txt \
 && uv pip install --system --no-cache -r /tmp/requirements.txt
COPY . .
RUN uv pip install --system --no-cache --no-deps --editable . && git config --system --add safe.directory /specbench
ENV HF_HOME=/cache/huggingface SPECBENCH_HOME=/cache/specbench
VOLUME ["/cache", "/specbench/runs"]
CMD ["specbench", "--help"]
