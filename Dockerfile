# CPU:  docker build -t embodied-ppo .
# GPU:  docker build -t embodied-ppo:gpu \
#           --build-arg BASE=docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04 .
# Run:  docker run --rm [--gpus all] --shm-size 8g -v embodied-runs:/home/ppo/embodied_ppo/runs \
#           embodied-ppo train experiment=quickstart
# torch contains its own CUDA libraries; the base image adds those of the driver. Ray needs
# --shm-size.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM ${BASE}
ARG BASE

# EGL for rendering without a screen; g++ for the option compile; Python if the base image has none
# (Debian 12: 3.11, Ubuntu 24.04: 3.12). Versions are those of the base image; the output of $( ) is
# split into words on purpose.
# hadolint ignore=DL3008,SC2046
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        make g++ libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri \
        $(command -v python3 >/dev/null || echo python3 python3-venv) \
    && rm -rf /var/lib/apt/lists/*

# The same uid with every base image, for shared volumes and for clusters that require a numeric
# user. Ubuntu's base image already uses 1000.
RUN if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid 1000 ppo
USER 1000
WORKDIR /home/ppo/embodied_ppo

# Copy single folders, so that .venv/ and runs/ of the host are not included.
COPY --chown=ppo Makefile pyproject.toml README.md LICENSE ./
COPY --chown=ppo scripts scripts
COPY --chown=ppo configs configs
COPY --chown=ppo envs envs
COPY --chown=ppo embodied_ppo embodied_ppo

# The same installation as on any machine. PyPI's torch for Linux is the CUDA build (several GB), so
# a CPU image installs torch from torch's own index (or from yours: --build-arg TORCH_INDEX=URL;
# empty: none).
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN case "$BASE" in *cuda*) ;; *) export PIP_EXTRA_INDEX_URL=$TORCH_INDEX ;; esac \
    && PIP_NO_CACHE_DIR=1 make .venv/base && mkdir -p runs

ENV PATH=/home/ppo/embodied_ppo/.venv/bin:$PATH \
    MUJOCO_GL=egl \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics

ENTRYPOINT ["embodied-ppo"]
CMD ["train", "experiment=quickstart"]
