"""OpenVLA: towers, teacher forcing, parallel and cached decoding, logits.

All weights are random. Results are compared with those of transformers.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from tiny_openvla_checkpoint import tiny_config
from torch import Tensor

from embodied_ppo.policies.vla import openvla
from embodied_ppo.policies.vla.openvla import Embedded, OpenVLA, OpenVLABody

STATS = {"q01": [-2.0, 0.0, 0.0], "q99": [2.0, 1.0, 0.5], "mask": [True, True, False]}
CONFIG = tiny_config(
    (32, 48, 3, 2, 128),
    dino=(16, 3, 2, 4, 7),
    siglip=(24, 4, 3, 40, 7),
    image_size=28,
    norm_stats={"bridge_orig": {"action": STATS}},
)
# Visual tokens: (28 / 7)².
P = 16
A = 3


def randomise(body: OpenVLABody, seed: int = 0) -> OpenVLABody:
    """Draw weights so large that all outputs depend on all inputs."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in body.named_parameters():
            scale = (
                1.0
                if p.ndim < 2 or name.endswith("embed_tokens.weight")
                else 2.0 / p[0].numel() ** 0.5
            )
            p.copy_(torch.randn(p.shape, generator=g) * scale)
        body.dino.embeddings.position_embeddings[:, 0] = 0
    return body


@cache
def shared() -> OpenVLABody:
    """Return one body for all tests that do not change it."""
    return randomise(OpenVLABody(CONFIG))


def batch(seed: int = 0, cameras: int = 0, size: int = 28) -> tuple[Tensor, Tensor, Tensor]:
    """Return images uint8 [3, (K,) 3, size, size], and ids and mask of 3 left-padded prompts."""
    g = torch.Generator().manual_seed(seed)
    shape = (3, *([cameras] if cameras else []), 3, size, size)
    images = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    ids = torch.full((3, 7), 32000)
    mask = torch.zeros(3, 7, dtype=torch.bool)
    for row, length in enumerate((7, 4, 5)):
        words = torch.randint(3, 29000, (length - 2,), generator=g)
        ids[row, 7 - length :] = torch.cat((torch.tensor([1]), words, torch.tensor([29871])))
        mask[row, 7 - length :] = True
    return images, ids, mask


def bins(seed: int = 0, count: int = A) -> Tensor:
    return torch.randint(0, 256, (3, count), generator=torch.Generator().manual_seed(seed))


def model_of(body: OpenVLABody, actions: int = A, **options: bool) -> OpenVLA:
    return OpenVLA(body, None, actions=actions, **options)


def embed(model: OpenVLA, images: Tensor, ids: Tensor, mask: Tensor) -> Embedded:
    """Return the embeddings of images and prompts."""
    return model.embed_prompt(model.encode_images(images), ids, mask)


def hidden_states(
    model: OpenVLA, images: Tensor, ids: Tensor, mask: Tensor, bins: Tensor | None = None
) -> Tensor:
    """Return the hidden states before each action token."""
    return model.hidden(embed(model, images, ids, mask), bins)


# ------------------------------------------------------------------------------------------- images
def test_features_agree_with_transformers() -> None:
    body = shared()
    pixels = torch.randn(2, 6, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = body.features(pixels)
        dino = body.dino(pixels[:, :3], output_hidden_states=True).hidden_states
        siglip = body.siglip(pixels[:, 3:], output_hidden_states=True).hidden_states
    # the input of the first layer and the output of each
    assert len(dino) == 3 + 1 and len(siglip) == 4 + 1
    assert features.shape == (2, P, 16 + 24)
    # class and register tokens
    torch.testing.assert_close(features[..., :16], dino[-2][:, 1 + 4 :], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features[..., 16:], siglip[-2], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(dino[-1], dino[-2], atol=0.1) and not torch.allclose(
        siglip[-1], siglip[-2], atol=0.1
    )


def test_pixels_by_hand() -> None:
    """White is (1 - .485) / .229 = 2.2489 for DINOv2 and (1 - .5) / .5 = 1 for SigLIP.

    Black is -.485 / .229 = -2.1179 and -1.
    """
    white = shared().pixels(torch.full((1, 3, 28, 28), 255, dtype=torch.uint8))
    assert white.shape == (1, 6, 28, 28) and white.dtype == torch.float32
    expected = torch.tensor([2.2489083, 2.4285714, 2.64, 1.0, 1.0, 1.0])
    torch.testing.assert_close(white[0, :, 5, 7], expected)
    black = shared().pixels(torch.zeros(1, 3, 50, 40, dtype=torch.uint8))
    expected = torch.tensor([-2.1179039, -2.0357143, -1.8044444, -1.0, -1.0, -1.0])
    torch.testing.assert_close(black[0, :, 5, 7], expected)


def test_resizing_agrees_with_pillow_up_to_one_level() -> None:
    image = pytest.importorskip("PIL.Image")
    g = torch.Generator().manual_seed(0)
    image_array = torch.randint(0, 256, (3, 60, 45), generator=g, dtype=torch.uint8)
    expected = image.fromarray(image_array.permute(1, 2, 0).numpy()).resize(
        (28, 28), image.Resampling.BICUBIC
    )
    pixels = (shared().pixels(image_array[None])[0, 3:] * 0.5 + 0.5) * 255
    difference = pixels.permute(1, 2, 0) - torch.from_numpy(np.array(expected)).float()
    assert float(difference.abs().max()) <= 1.01 and float(difference.abs().mean()) < 0.05


def test_center_crop_by_hand() -> None:
    """A ramp of 10 pixels: the crop begins at 9 (1 - sqrt(.9)) / 2 = 0.2309 and ends at 8.7691.

    Of levels 20 i, its first pixel is 4.618, floor(255.5 / 255 · 4.618) = 4; the middle one is 90;
    the last one 175.38, floor(175.73) = 175.
    """
    ramp = (20 * torch.arange(10, dtype=torch.uint8)).view(1, 1, 1, 10).expand(1, 3, 10, 10)
    cropped = openvla.center_crop(ramp, 3)
    assert cropped.shape == (1, 3, 3, 3) and cropped.dtype == torch.float32
    assert torch.equal(cropped[0, 1], torch.tensor([4.0, 90, 175]).expand(3, 3))
    assert torch.equal(openvla.center_crop(ramp.mT, 3), cropped.mT)
    levels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    assert torch.equal(openvla.center_crop(levels, 5)[:, 0, 2, 2], torch.arange(256.0))


# ------------------------------------------------------------------------------------ hidden states
def reference_hidden_states(
    body: OpenVLABody, images: Tensor, ids: Tensor, mask: Tensor, after: Tensor, causal: bool
) -> Tensor:
    """Return the hidden states [S + n, D] of row 0, computed by transformers.

    The sequence is BOS, image, words, ``after`` [n, D].
    """
    llama = body.language_model.model
    words = llama.embed_tokens(ids[0, mask[0]])
    x = torch.cat((words[:1], body.vision(images[:1])[0], words[1:], after))[None]
    size = x.shape[1]
    bias = torch.zeros(1, 1, size, size)
    if causal:
        bias = bias.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(), float("-inf"))
    return llama(inputs_embeds=x, attention_mask=bias, use_cache=False).last_hidden_state[0]


@torch.no_grad()
@pytest.mark.parametrize("row", [0, 1, 2])
def test_teacher_forcing_agrees_with_llama(row: int) -> None:
    body = shared()
    images, ids, mask = (x[row : row + 1] for x in batch())
    action = bins()[row : row + 1]
    after = body.language_model.model.embed_tokens(31999 - action[0])
    expected = reference_hidden_states(body, images, ids, mask, after, causal=True)[-A - 1 : -1]
    actual = hidden_states(model_of(body), *batch(), bins())[row]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("row", "ends"), [(0, True), (1, True), (2, True), (1, False)])
def test_parallel_decoding_agrees_with_llama_without_causal_mask(row: int, ends: bool) -> None:
    body = shared()
    images, ids, mask = (x[row : row + 1] for x in batch())
    stop = body.language_model.model.embed_tokens(
        torch.tensor([2] if ends else [], dtype=torch.int64)
    )
    after = torch.cat((torch.zeros(6, 32), stop))
    expected = reference_hidden_states(body, images, ids, mask, after, causal=False)
    expected = expected[-1 - len(after) : -1 - len(stop)]
    actual = hidden_states(model_of(body, 6, stop_token=ends), *batch())[row]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cameras", [0, 2])
@pytest.mark.parametrize("rows", [[0, 1, 2], [0], [1], [2, 0]])
def test_cached_decoding_agrees_with_teacher_forcing(rows: list[int], cameras: int) -> None:
    """Compare hidden states and log-probabilities with left padding, for any micro-batch."""
    model, action = model_of(shared()), bins()
    full = hidden_states(model, *batch(cameras=cameras), action)
    images, ids, mask = (x[rows] for x in batch(cameras=cameras))
    hidden, cache = model.start(embed(model, images, ids, mask))
    steps = [hidden]
    for a in range(A - 1):
        steps.append(model.next(action[rows, a], cache))
    cached = torch.stack(steps, dim=1)
    torch.testing.assert_close(cached, full[rows], rtol=1e-5, atol=1e-5)
    log_p = [
        model.logits(h).log_softmax(-1).gather(-1, action[rows, :, None])
        for h in (cached, full[rows])
    ]
    assert float((log_p[0] - log_p[1]).abs().max()) <= 1e-5
    with pytest.raises(AssertionError):  # the cache is full
        model.next(action[rows, A - 1], cache)


def test_gradients_reach_exactly_the_trained_parameters() -> None:
    body = randomise(OpenVLABody(CONFIG))
    model = model_of(body)
    model.logits(hidden_states(model, *batch(), bins())).square().mean().backward()
    empty = {n for n, p in body.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert empty == {name for name, p in body.named_parameters() if not p.requires_grad}
    unread = ("dino.encoder.layer.2.", "dino.layernorm.")
    unread += ("siglip.encoder.layers.3.", "siglip.post_layernorm.", "siglip.head.")
    assert all(name.startswith(unread) for name in empty)
    # timm's class token has no position embedding. It must stay 0, because the published layout
    # does not contain it.
    grad = body.dino.embeddings.position_embeddings.grad
    assert not grad[:, 0].any() and grad[:, 1:].any()


# ------------------------------------------------------------------------------------------ actions
@torch.no_grad()
def test_logits_equal_those_of_the_full_vocabulary() -> None:
    """Column k is id 31999 - k; the 64 ids of padding above it are not actions."""
    model = model_of(shared())
    hidden = hidden_states(model, *batch(), bins())
    full = hidden @ shared().language_model.lm_head.weight.T  # [3, A, 32064]
    logits = model.logits(hidden)
    assert logits.shape == (3, A, 256) and logits.dtype == torch.float32
    for k in (0, 1, 254, 255):
        torch.testing.assert_close(logits[..., k], full[..., 31999 - k], rtol=1e-4, atol=1e-4)
    ids = 31999 - torch.arange(256)
    assert int(ids.min()) == 31744
    others = torch.ones(32064, dtype=torch.bool)
    others[ids] = False
    masked = full.masked_fill(others, float("-inf")).log_softmax(-1)[..., ids]
    torch.testing.assert_close(logits.log_softmax(-1), masked, rtol=1e-4, atol=1e-4)
