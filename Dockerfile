# CPU:  docker build -t embodied-ppo .
# GPU:  docker build -t embodied-ppo:gpu --build-arg BASE=docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04 .
# Run:  docker run --rm [--gpus all] --shm-size 8g -v embodied-runs:/home/ppo/embodied_ppo/runs embodied-ppo train experiment=quickstart
# (torch brings its own CUDA libraries; the base adds what the driver needs. Ray wants the shared memory.)
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM ${BASE}
ARG BASE

# EGL for pictures without a screen; g++ for the option compile; Python where the base has none (Debian 12: 3.11, Ubuntu 24.04: 3.12).
# Versions are the base's, which the builder chooses; the words of $( ) are meant to be split.
# hadolint ignore=DL3008,SC2046
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        make g++ libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri \
        $(command -v python3 >/dev/null || echo python3 python3-venv) \
    && rm -rf /var/lib/apt/lists/*

# One number over every base: who else writes the volume of runs, and a cluster that asks for a numbered user, rely on it.
# Ubuntu's base has given 1000 away.
RUN if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid 1000 ppo
USER 1000
WORKDIR /home/ppo/embodied_ppo

# No COPY of the whole folder: .venv/ and runs/ of the host stay out of the image.
COPY --chown=ppo Makefile pyproject.toml README.md LICENSE ./
COPY --chown=ppo scripts scripts
COPY --chown=ppo configs configs
COPY --chown=ppo envs envs
COPY --chown=ppo embodied_ppo embodied_ppo

# The same installation as on any machine. PyPI's torch for Linux is the CUDA build (GBs): a CPU image asks torch's own index
# (or yours: --build-arg TORCH_INDEX=URL; empty: none).
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN case "$BASE" in *cuda*) ;; *) export PIP_EXTRA_INDEX_URL=$TORCH_INDEX ;; esac \
    && PIP_NO_CACHE_DIR=1 make .venv/base && mkdir -p runs

ENV PATH=/home/ppo/embodied_ppo/.venv/bin:$PATH \
    MUJOCO_GL=egl \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics

ENTRYPOINT ["embodied-ppo"]
CMD ["train", "experiment=quickstart"]
