"""The masked auto-encoder against the paper's tables and against loops written from its equations."""

import argparse
import math

import numpy as np
import pytest
import torch

import spirl_rainbow as spirl


def test_parameter_counts_are_those_of_table_4():
    mae = spirl.MaskedAutoencoder()
    encoder = [mae.patch_embed, mae.blocks, mae.norm]
    decoder = [mae.decoder_embed, mae.decoder_blocks, mae.decoder_norm, mae.decoder_pred]
    for modules, expected in ((encoder, 162_432), (decoder, 628_160), ([mae], 790_784)):
        assert sum(p.numel() for module in modules for p in module.parameters()) == expected


def test_the_auto_encoder_begins_as_the_authors_does():
    """Xavier-uniform weights and zero biases; q, k and v are one layer of three times the outputs, so its bound is
    smaller. Tokens are small, and a LayerNorm divides by no less than 0.001."""
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder()
    linear = [layer for layer in mae.modules() if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)]
    for layer in linear:
        weight = layer.weight.flatten(1)  # (out, in); of the convolution (64, 3 * 8 * 8)
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.97 * bound < weight.abs().max() <= bound and not layer.bias.any(), layer
    assert {layer.eps for layer in mae.modules() if isinstance(layer, torch.nn.LayerNorm)} == {1e-6}
    tokens = torch.cat([mae.cls_token, mae.mask_token], 2)
    assert tokens.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_facebookresearch_checkpoint_loads(tmp_path):
    """Its names are the same; beside the weights it has arguments, as a Namespace, but no sizes."""
    state = spirl.MaskedAutoencoder().state_dict()
    assert {"cls_token", "patch_embed.proj.weight", "blocks.2.attn.qkv.bias", "decoder_pos_embed"} < state.keys()
    torch.save({"model": state, "optimizer": {}, "epoch": 1, "args": argparse.Namespace(lr=1.0)}, tmp_path / "mae.pt")
    mae = spirl.MaskedAutoencoder()
    assert spirl.load_mae(tmp_path / "mae.pt", mae, spirl.Args()) == {}  # nothing else of it is kept
    assert all(torch.equal(value, state[name]) for name, value in mae.state_dict().items())


def test_what_does_not_fit_is_refused_with_what_is_wanted(tmp_path):
    mae = spirl.MaskedAutoencoder(image_size=24, encoder_depth=1, decoder_depth=1)
    frames = torch.zeros(2, 24, 24, 3, dtype=torch.uint8)
    for other in (frames.permute(0, 3, 1, 2), frames / 255, frames[:, :16], frames[0]):
        with pytest.raises(ValueError, match=r"must be torch.uint8 of shape \(B, 24, 24, 3\)"):
            mae(other)
    with pytest.raises(ValueError, match="image_size is 225; it must be a multiple of patch_size, 8"):
        spirl.MaskedAutoencoder(image_size=225)
    with pytest.raises(ValueError, match=r"there are 2 frames; a batch \(mae_batch_size\) needs 64"):
        spirl.pretrain_mae(spirl.Args(), mae, frames, frames, tmp_path)


def test_grey_images_and_many_small_patches():
    mae = spirl.MaskedAutoencoder(image_size=80, patch_size=2, encoder_depth=1, decoder_depth=1, channels=1)
    loss, prediction, _ = mae(torch.randint(256, (1, 80, 80, 1), dtype=torch.uint8), 0.9)
    assert prediction.shape == (1, 1600, 4) and loss.isfinite()
    mae = spirl.MaskedAutoencoder(image_size=300, patch_size=1, encoder_depth=1, decoder_depth=1)
    hashes = spirl.ErrorMapCache(mae).hashes(torch.zeros(1, 300, 300, 3, dtype=torch.uint8))
    assert len(set(hashes)) == 90_000  # a place is part of the key, more than 255 a side too


def layer_norm(x, module):
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    normalised = [(value - mean) / math.sqrt(variance + 1e-6) for value in x]
    return [value * w + b for value, w, b in zip(normalised, module.weight.tolist(), module.bias.tolist())]


def linear(x, module):
    weight, bias = module.weight.tolist(), module.bias.tolist()
    return [sum(w * value for w, value in zip(row, x)) + b for row, b in zip(weight, bias)]


def plus(x, y):
    return [a + b for a, b in zip(x, y, strict=True)]


def oracle_block(X, block, heads, residual=True):
    """One Transformer layer as the paper's Background writes it: lists of lists, loops, no tensors. Returns what comes
    out for each token, and the attention that each one pays to all, averaged over the heads."""
    d = len(X[0]) // heads
    projected = [linear(layer_norm(x, block.norm1), block.attn.qkv) for x in X]  # q of all heads, then k, then v
    Z, attention = [], []
    for x, own in zip(X, projected):
        concatenated, paid = [], [0.0] * len(X)
        for head in range(heads):
            q = own[head * d :][:d]
            K = [p[(heads + head) * d :][:d] for p in projected]
            V = [p[(2 * heads + head) * d :][:d] for p in projected]
            scores = [math.exp(sum(a * b for a, b in zip(q, k)) / math.sqrt(d)) for k in K]
            weights = [s / sum(scores) for s in scores]
            paid = [p + w / heads for p, w in zip(paid, weights)]
            concatenated += [sum(w * v[c] for w, v in zip(weights, V)) for c in range(d)]
        mhsa = linear(concatenated, block.attn.proj)
        x = plus(x, mhsa) if residual else mhsa
        hidden = [h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in linear(layer_norm(x, block.norm2), block.mlp.fc1)]
        out = linear(hidden, block.mlp.fc2)
        Z.append(plus(x, out) if residual else out)
        attention.append(paid)
    return Z, attention


def oracle_position(dim, place, side):
    """Sines and cosines of a patch's column, then of its row."""
    position = []
    for at in (place % side, place // side):
        angles = [at / 10000 ** (k / (dim / 4)) for k in range(dim // 4)]
        position += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    return position


def oracle_mae(mae, frame, kept, encoder_heads, decoder_heads):
    """The decoder's patches, (N, C), of one frame (H, W, 3) of which the encoder sees the patches `kept`: loops."""
    side, p = mae.side, mae.patch_size
    kernel, bias = mae.patch_embed.proj.weight, mae.patch_embed.proj.bias
    X = [mae.cls_token.flatten().tolist()]  # [cls] has no position
    for place in kept:
        square = frame[place // side * p :, place % side * p :][:p, :p].double() / 255
        embedded = [float((filter.permute(1, 2, 0) * square).sum() + b) for filter, b in zip(kernel, bias)]
        X.append(plus(embedded, oracle_position(len(bias), place, side)))
    for block in mae.blocks:
        X, _ = oracle_block(X, block, encoder_heads)
    cls, *seen = [linear(layer_norm(x, mae.norm), mae.decoder_embed) for x in X]
    Z = [cls]
    for n in range(side * side):
        token = seen[kept.index(n)] if n in kept else mae.mask_token.flatten().tolist()
        Z.append(plus(token, oracle_position(len(token), n, side)))
    for block in mae.decoder_blocks:
        Z, _ = oracle_block(Z, block, decoder_heads)
    return torch.tensor([linear(layer_norm(z, mae.decoder_norm), mae.decoder_pred) for z in Z[1:]])


def test_the_whole_auto_encoder_and_its_loss_against_loops():
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder(12, 4, 8, 2, 2, decoder_dim=12, decoder_depth=4, decoder_heads=3)
    assert (len(mae.blocks), len(mae.decoder_blocks)) == (2, 4)
    for p in mae.requires_grad_(False).parameters():  # larger than at the start, biases and LayerNorms too
        p.add_(torch.randn_like(p) * 0.3)
    frames = torch.randint(256, (2, 12, 12, 3), dtype=torch.uint8)
    loss, prediction, mask = mae(frames, 0.6, torch.Generator().manual_seed(1))
    assert (mask == 0).sum(1).tolist() == [3, 3]  # int(9 * 0.4) are seen
    squared_errors = []
    for frame, got, removed in zip(frames, prediction, mask):
        kept = (removed == 0).nonzero()[:, 0].tolist()
        expected = oracle_mae(mae, frame, kept, 2, 3)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        for n in range(9):  # Eq. (1), over all patches
            patch = frame[n // 3 * 4 :, n % 3 * 4 :][:4, :4].flatten().double()
            normalised = (patch - patch.mean()) / patch.std(correction=1)  # Eq. (2)
            squared_errors += ((normalised - expected[n]) ** 2).tolist()
    assert loss.item() == pytest.approx(np.mean(squared_errors), rel=1e-4)


def test_the_learning_rate_warms_up_and_falls_to_zero():
    rates = [spirl.warmup_cosine(step, 1000, 2.0) for step in range(1001)]
    assert rates[0] == 0 and rates[50] == pytest.approx(1.0) and rates[100] == 2.0 == max(rates)
    assert rates[550] == pytest.approx(1.0) and rates[1000] == pytest.approx(0.0)  # half a cosine


def small_mae(seed=0):
    torch.manual_seed(seed)
    return spirl.MaskedAutoencoder(encoder_depth=1, decoder_depth=1)


@pytest.fixture
def frames(random_play):
    """100 real frames, 25 of each game."""
    return torch.from_numpy(np.concatenate([play[::16] for play in random_play.values()]))


def test_pretraining_is_that_of_table_5_with_a_mask_ratio_that_varies(frames, monkeypatch, tmp_path):
    made, ratios, adamw = [], [], torch.optim.AdamW

    def kept(*args, **more):
        made.append(adamw(*args, **more))
        return made[0]

    monkeypatch.setattr(torch.optim, "AdamW", kept)
    mae, args = small_mae(), spirl.Args(mae_epochs=16, mae_batch_size=8, mae_mask_ratio=0.7, mae_mask_spread=0.25)
    args.mae_learning_rate, args.mae_weight_decay = 0.03, 0.07
    mae.register_forward_pre_hook(lambda module, inputs: ratios.append(inputs[1]))
    held_out = frames[1::2]
    held_out_losses = spirl.pretrain_mae(args, mae, frames[::2], held_out, tmp_path)
    names = {id(p): name for name, p in mae.named_parameters()}
    # 6 batches an epoch, so 96 steps, the first 9.6 of them warm-up; peak = base lr * batch / 256
    last = 0.03 * 8 / 256 * 0.5 * (1 + math.cos(math.pi * (95 - 9.6) / (96 - 9.6)))
    for group in made[0].param_groups:
        assert group["betas"] == (0.9, 0.95) and group["lr"] == pytest.approx(last)
        for name in (names.pop(id(p)) for p in group["params"]):
            not_decayed = "norm" in name or name.endswith("bias")
            assert group["weight_decay"] == (0.0 if not_decayed else 0.07), name
    assert not names  # each parameter is in a group
    held_out_ratios, drawn = ratios[6::7], np.delete(ratios, slice(6, None, 7))
    assert held_out_ratios == [0.7] * 16 and len(drawn) == len(set(drawn)) == 96
    assert 0.45 <= min(drawn) < 0.5 and 0.9 < max(drawn) <= 0.95
    # At first it is no better than each patch's mean, which is zero after Eq. (2).
    zero = spirl.normalize_patches(mae.patchify(held_out)).square().mean().item()
    assert len(held_out_losses) == 16 and held_out_losses[0] > 0.9 * zero and held_out_losses[-1] < zero


def test_each_epoch_has_all_frames_in_an_order_of_its_own_and_each_frame_a_mask_of_its_own(tmp_path):
    frames, drawn = torch.randint(256, (64, 48, 48, 3), dtype=torch.uint8), []
    frames[:, 0, 0, 0] = torch.arange(64)  # a frame's number
    for seed in (1, 2):
        mae = spirl.MaskedAutoencoder(48, encoder_depth=1, decoder_depth=1)
        mae.register_forward_hook(lambda mae, inputs, outputs: drawn.append((inputs[0][:, 0, 0, 0], outputs[2])))
        spirl.pretrain_mae(spirl.Args(seed=seed, mae_epochs=2), mae, frames, frames[:1], tmp_path / str(seed))
    orders, masks = zip(*drawn[::2])  # one batch an epoch; then the held-out frame
    assert all(sorted(order.tolist()) == [*range(64)] for order in orders)
    assert len(torch.stack([torch.arange(64), *orders]).unique(dim=0)) == 5
    assert len(torch.cat(masks).unique(dim=0)) == 4 * 64


def test_pretraining_stops_at_what_is_not_finite(frames, tmp_path):
    mae = small_mae()
    mae.decoder_pred.weight.data.fill_(3e19)  # the loss is finite, its gradient overflows
    before = {name: value.clone() for name, value in mae.state_dict().items()}
    with pytest.raises(RuntimeError, match="non-finite"):
        spirl.pretrain_mae(spirl.Args(), mae, frames, frames, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in mae.state_dict().items())


def test_pretraining_goes_on_from_its_checkpoint_where_it_is_asked_to(frames, tmp_path):
    """With `resume`, here after the last epoch: nothing is left to do. Without it training begins anew."""
    args, maes = spirl.Args(mae_epochs=2, mae_batch_size=32), [small_mae(seed) for seed in range(3)]
    losses = [spirl.pretrain_mae(args, mae, frames, frames[:16], tmp_path) for mae in maes[:2]]
    assert losses[1][0] != losses[0][0]
    args.resume = "runs/NAME"
    assert spirl.pretrain_mae(args, maes[2], frames, frames[:16], tmp_path) == losses[1]
    assert all(torch.equal(value, maes[1].state_dict()[name]) for name, value in maes[2].state_dict().items())
