# gracetune for aarch64 machines with an NVIDIA GPU: GH200, GB200, DGX Spark (GB10).
#
#   docker build -f docker/aarch64.Dockerfile -t gracetune .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD":/work gracetune doctor
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD":/work gracetune train photos.yaml
#
# It was never built on such a machine: we have none. tests/unit/scripts/test_container.py checks that the files, the
# package extras and the commands it names exist. The driver of the host must support the CUDA release of torch's wheel.
FROM ubuntu:24.04

# gcc builds the native library, and Triton's kernels at run time, which need Python's headers.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv numactl \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/gracetune
ENV PATH=/opt/gracetune/bin:$PATH

COPY pyproject.toml setup.py MANIFEST.in constraints.txt README.md LICENSE /build/
COPY train.py gh200_diagnostic.py validate_uvm.py accelerate_config_gh200.yaml /build/
COPY simpletuner/train.py /build/simpletuner/train.py
COPY scripts/setup_gh200_env.sh /build/scripts/setup_gh200_env.sh
COPY config /build/config
COPY examples /build/examples
COPY src /build/src

# PyPI's torch for Linux on aarch64 is a CUDA build. constraints.txt pins the versions that the tests run with.
RUN python -m pip install --no-cache-dir --constraint /build/constraints.txt "/build[cloud]" \
 && gracetune --version \
 && python -c "import importlib.resources as r; assert (r.files('gracetune') / 'memory/native/_uvm.so').is_file()" \
 && rm -rf /build

# Models, Triton's kernels and run folders belong on a volume of the host.
ENV HF_HOME=/work/.cache/huggingface \
    TRITON_CACHE_DIR=/work/.cache/triton
VOLUME /work
WORKDIR /work

ENTRYPOINT ["gracetune"]
CMD ["--help"]
