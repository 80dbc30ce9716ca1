"""OpenVLA: towers, teacher forcing, parallel and cached decoding, logits.

All weights are random. Results are compared with those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from embodied_ppo.models.vla import openvla
from embodied_ppo.models.vla.openvla import Embedded, OpenVLABody, OpenVLAConfig, TowerConfig

STATS = {"q01": [-2.0, 0.0, 0.0], "q99": [2.0, 1.0, 0.5], "mask": [True, True, False]}
CONFIG = OpenVLAConfig(
    text={
        "vocab_size": 32064,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 32000,
    },
    dino=TowerConfig(hidden_size=16, layers=3, heads=2, intermediate_size=64, patch_size=7),
    siglip=TowerConfig(hidden_size=24, layers=4, heads=3, intermediate_size=40, patch_size=7),
    image_size=28,
    norm_stats={"bridge_orig": {"action": STATS}},
)
P = 16
"""Visual tokens: (28 / 7)²."""
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


def embed(body: OpenVLABody, images: Tensor, ids: Tensor, mask: Tensor) -> Embedded:
    """Return the embeddings of images and prompts."""
    return body.embed_prompt(body.vision(images), ids, mask)


def hidden_states(
    body: OpenVLABody,
    images: Tensor,
    ids: Tensor,
    mask: Tensor,
    actions: Tensor | None = None,
    *,
    placeholders: int = 0,
) -> Tensor:
    """Return the hidden states before each action token."""
    return body.predict(embed(body, images, ids, mask), actions, placeholders=placeholders)


# ------------------------------------------------------------------------------------------- images
def test_features_agree_with_transformers() -> None:
    body = shared()
    pixels = torch.randn(2, 6, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = body.features(pixels)
        dino = body.dino(pixels[:, :3], output_hidden_states=True).hidden_states
        siglip = body.siglip(pixels[:, 3:], output_hidden_states=True).hidden_states
    assert (
        len(dino) == 3 + 1 and len(siglip) == 4 + 1
    )  # the input of the first layer and the output of each
    assert features.shape == (2, P, 16 + 24)
    torch.testing.assert_close(
        features[..., :16], dino[-2][:, 1 + 4 :], rtol=1e-5, atol=1e-5
    )  # class and register tokens
    torch.testing.assert_close(features[..., 16:], siglip[-2], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(dino[-1], dino[-2], atol=0.1) and not torch.allclose(
        siglip[-1], siglip[-2], atol=0.1
    )


def test_both_towers_use_the_exact_gelu() -> None:
    """transformers' SigLIP uses the tanh approximation by default, timm's the exact function."""
    assert shared().dino.config.hidden_act == shared().siglip.config.hidden_act == "gelu"


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


def test_visual_tokens_of_several_cameras() -> None:
    body = shared()
    images, _, _ = batch(cameras=2)
    with torch.no_grad():
        both = body.vision(images)
        assert both.shape == (3, 2 * P, 32)
        for k in range(2):
            torch.testing.assert_close(
                both[:, k * P : (k + 1) * P], body.vision(images[:, k]), rtol=1e-5, atol=1e-5
            )


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
    actual = hidden_states(body, *batch(), bins())[row]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("row", "ends"), [(0, True), (1, True), (2, True), (1, False)])
def test_parallel_decoding_agrees_with_llama_without_causal_mask(
    row: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = shared()
    monkeypatch.setattr(body, "stop_token", ends)
    images, ids, mask = (x[row : row + 1] for x in batch())
    stop = body.language_model.model.embed_tokens(
        torch.tensor([2] if ends else [], dtype=torch.int64)
    )
    after = torch.cat((torch.zeros(6, 32), stop))
    expected = reference_hidden_states(body, images, ids, mask, after, causal=False)
    expected = expected[-1 - len(after) : -1 - len(stop)]
    actual = hidden_states(body, *batch(), placeholders=6)[row]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cameras", [0, 2])
@pytest.mark.parametrize("rows", [[0, 1, 2], [0], [1], [2, 0]])
def test_cached_decoding_agrees_with_teacher_forcing(rows: list[int], cameras: int) -> None:
    """Compare hidden states and log-probabilities with left padding, for any micro-batch."""
    body, action = shared(), bins()
    full = hidden_states(body, *batch(cameras=cameras), action)
    images, ids, mask = (x[rows] for x in batch(cameras=cameras))
    hidden, cache = body.begin(embed(body, images, ids, mask), room=A - 1)
    steps = [hidden]
    for a in range(A - 1):
        steps.append(body.step(action[rows, a], cache))
    cached = torch.stack(steps, dim=1)
    torch.testing.assert_close(cached, full[rows], rtol=1e-5, atol=1e-5)
    log_p = [
        body.logits(h).log_softmax(-1).gather(-1, action[rows, :, None])
        for h in (cached, full[rows])
    ]
    assert float((log_p[0] - log_p[1]).abs().max()) <= 1e-5
    with pytest.raises(AssertionError):  # the cache is full
        body.step(action[rows, A - 1], cache)


@torch.no_grad()
@pytest.mark.parametrize("parallel", [False, True])
def test_padding_and_micro_batches_have_no_effect(parallel: bool) -> None:
    body = shared()

    def hidden(images: Tensor, ids: Tensor, mask: Tensor, action: Tensor) -> Tensor:
        if parallel:
            return hidden_states(body, images, ids, mask, placeholders=A)
        return hidden_states(body, images, ids, mask, action)

    images, ids, mask = batch()
    full = hidden(images, ids, mask, bins())
    more = F.pad(ids, (4, 0), value=7), F.pad(mask, (4, 0))
    torch.testing.assert_close(hidden(images, *more, bins()), full, rtol=1e-5, atol=1e-5)
    for row, length in enumerate((7, 4, 5)):
        single = hidden(
            *(x[row : row + 1] for x in (images, ids[:, -length:], mask[:, -length:], bins()))
        )
        torch.testing.assert_close(single[0], full[row], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_teacher_forcing_is_causal() -> None:
    body, action = shared(), bins()
    other = action.clone()
    other[:, 1] = (other[:, 1] + 100) % 256
    before, after = hidden_states(body, *batch(), action), hidden_states(body, *batch(), other)
    torch.testing.assert_close(after[:, :2], before[:, :2], rtol=1e-5, atol=1e-5)
    assert float((after[:, 2] - before[:, 2]).abs().amax(-1).min()) > 1e-2
    torch.testing.assert_close(
        hidden_states(body, *batch(), action[:, :1]), before[:, :1], rtol=1e-5, atol=1e-5
    )


def test_parallel_decoding_is_bidirectional() -> None:
    """The first action's state has a gradient to the embeddings of BOS and of the last token.

    With a causal mask it has none to later tokens.
    """
    body = randomise(OpenVLABody(CONFIG))
    weight = body.language_model.model.embed_tokens.weight
    some = torch.randn(32, generator=torch.Generator().manual_seed(1))

    first = hidden_states(body, *batch(), placeholders=4)[:, 0]
    (grad,) = torch.autograd.grad((first * some).sum(), weight)
    assert float(grad[2].norm()) > 1e-4 and float(grad[1].norm()) > 1e-4
    with torch.no_grad():  # the number of placeholders has an effect
        assert not torch.allclose(
            first, hidden_states(body, *batch(), placeholders=5)[:, 0], atol=1e-3
        )
    action = torch.tensor([[5, 6, 7]] * 3)
    (grad,) = torch.autograd.grad(
        (hidden_states(body, *batch(), action)[:, 0] * some).sum(), weight
    )
    assert float(grad[31999 - 5].norm()) == 0 and float(grad[1].norm()) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("decoding", ["teacher", "parallel", "cached"])
def test_logits_depend_on_the_image(decoding: str) -> None:
    """The published code ignores it with transformers 4.50 and later (openvla/openvla#346)."""
    body = shared()
    images, ids, mask = batch()
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "teacher": lambda x: hidden_states(body, x, ids, mask, bins()),
        "parallel": lambda x: hidden_states(body, x, ids, mask, placeholders=A),
        "cached": lambda x: body.step(
            bins()[:, 0], body.begin(embed(body, x, ids, mask), room=1)[1]
        ),
    }
    logits = [body.logits(forms[decoding](x)) for x in (images, 255 - images)]
    change = (logits[0] - logits[1]).abs().flatten(1).amax(1)
    assert float(change.min()) > 0.1, change


def test_gradients_reach_exactly_the_trained_parameters() -> None:
    body = randomise(OpenVLABody(CONFIG))
    body.logits(hidden_states(body, *batch(), bins())).square().mean().backward()
    empty = {
        name for name, p in body.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    }
    assert empty == {name for name, p in body.named_parameters() if not p.requires_grad}
    unread = (
        "dino.encoder.layer.2.",
        "dino.layernorm.",
        "siglip.encoder.layers.3.",
        "siglip.post_layernorm.",
    )
    assert all(name.startswith((*unread, "siglip.head.")) for name in empty)
    # timm's class token has no position embedding. It must stay 0, because the published layout
    # does not contain it.
    grad = body.dino.embeddings.position_embeddings.grad
    assert not grad[:, 0].any() and grad[:, 1:].any()


@pytest.mark.parametrize("parallel", [False, True])
def test_recomputed_layers_give_equal_gradients(parallel: bool) -> None:
    body = randomise(OpenVLABody(CONFIG))
    weights = [
        body.dino.embeddings.cls_token,
        body.siglip.embeddings.patch_embedding.weight,
        body.projector.fc1.weight,
    ]
    grads = []
    for recompute in (False, True):
        body.recompute = recompute
        hidden = (
            hidden_states(body, *batch(), placeholders=A)
            if parallel
            else hidden_states(body, *batch(), bins())
        )
        grads.append(torch.autograd.grad(body.logits(hidden).square().mean(), weights))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_train_keeps_evaluation_mode() -> None:
    body = OpenVLABody(CONFIG)
    body.train()
    assert not any(module.training for module in body.modules())


# ------------------------------------------------------------------------------------------ actions
@torch.no_grad()
def test_logits_equal_those_of_the_full_vocabulary() -> None:
    """Column k is id 31999 - k; the 64 ids of padding above it are not actions."""
    body = shared()
    hidden = hidden_states(body, *batch(), bins())
    full = hidden @ body.language_model.lm_head.weight.T  # [3, A, 32064]
    logits = body.logits(hidden)
    assert logits.shape == (3, A, 256) and logits.dtype == torch.float32
    for k in (0, 1, 254, 255):
        torch.testing.assert_close(logits[..., k], full[..., 31999 - k], rtol=1e-4, atol=1e-4)
    ids = 31999 - torch.arange(256)
    assert int(ids.min()) == 31744
    others = torch.ones(32064, dtype=torch.bool)
    others[ids] = False
    masked = full.masked_fill(others, float("-inf")).log_softmax(-1)[..., ids]
    torch.testing.assert_close(logits.log_softmax(-1), masked, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_logits_are_float32_with_bfloat16_and_autocast() -> None:
    body = shared()
    hidden = hidden_states(body, *batch(), bins())
    logits = body.logits(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(body.logits(hidden), logits)
    half = randomise(OpenVLABody(CONFIG, dtype=torch.bfloat16))
    states = hidden_states(half, *batch(), bins())
    assert states.dtype == torch.bfloat16 and half.logits(states).dtype == torch.float32
    assert half.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
