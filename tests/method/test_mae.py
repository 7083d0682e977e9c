"""The masked auto-encoder against the paper's tables and against loops written from its equations."""

import argparse
import math
import re

import numpy as np
import pytest
import torch

import spirl_rainbow as spirl


def count(modules):
    return sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad)


def test_parameter_counts_are_those_of_table_4():
    mae = spirl.MaskedAutoencoder()
    assert count([mae.patch_embed, mae.blocks, mae.norm]) == 162_432
    assert count([mae.decoder_embed, mae.decoder_blocks, mae.decoder_norm, mae.decoder_pred]) == 628_160
    assert mae.cls_token.numel() == 64 and mae.mask_token.numel() == 128
    assert count([mae]) == 790_784


def facebook_state_dict():
    """Random weights under the names and shapes that facebookresearch/mae's models_mae.py gives them."""
    shapes = {"cls_token": (1, 1, 64), "pos_embed": (1, 145, 64), "mask_token": (1, 1, 128),
              "decoder_pos_embed": (1, 145, 128), "patch_embed.proj.weight": (64, 3, 8, 8),
              "patch_embed.proj.bias": (64,), "norm.weight": (64,), "norm.bias": (64,),
              "decoder_embed.weight": (128, 64), "decoder_embed.bias": (128,), "decoder_norm.weight": (128,),
              "decoder_norm.bias": (128,), "decoder_pred.weight": (192, 128), "decoder_pred.bias": (192,)}
    for blocks, dim in (("blocks", 64), ("decoder_blocks", 128)):
        for i in range(3):
            for name, out, into in (("attn.qkv", 3 * dim, dim), ("attn.proj", dim, dim),
                                    ("mlp.fc1", 4 * dim, dim), ("mlp.fc2", dim, 4 * dim)):
                shapes[f"{blocks}.{i}.{name}.weight"] = (out, into)
                shapes[f"{blocks}.{i}.{name}.bias"] = (out,)
            for name in ("norm1", "norm2"):
                shapes[f"{blocks}.{i}.{name}.weight"] = shapes[f"{blocks}.{i}.{name}.bias"] = (dim,)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_a_facebookresearch_checkpoint_loads(tmp_path):
    state = facebook_state_dict()
    torch.save({"model": state, "optimizer": {}, "epoch": 1, "args": argparse.Namespace(lr=1.0)}, tmp_path / "mae.pt")
    mae = spirl.MaskedAutoencoder()
    assert spirl.load_mae(tmp_path / "mae.pt", mae, spirl.Args()) == {}
    loaded = mae.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("change, message", [
    (lambda content: content["sizes"].update(encoder_depth=2), "has encoder_depth 2; give --encoder-depth 2"),
    (lambda content: content.update(env_id="ALE/Pong-v5"), "has env_id ALE/Pong-v5; give --env-id ALE/Pong-v5"),
    (lambda content: content["model"].pop("norm.weight"), "does not fit the auto-encoder .*norm.weight"),
    (lambda content: content["model"].update(more=torch.zeros(2)), "does not fit the auto-encoder .*more"),
    (lambda content: content.pop("model"), "does not fit the auto-encoder"),
    (lambda content: content.update(model={"trunk.project.weight": torch.zeros(2)}), "does not fit the auto-encoder"),
])
def test_a_wrong_checkpoint_is_refused_in_one_line(tmp_path, capsys, change, message):
    args, mae = spirl.Args(), spirl.MaskedAutoencoder()
    spirl.save_mae(tmp_path / "mae.pt", mae, args, {})
    content = torch.load(tmp_path / "mae.pt", weights_only=True)
    change(content)
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(SystemExit) as exit:
        spirl.load_mae(tmp_path / "changed.pt", mae, args)
    printed = capsys.readouterr().err
    assert exit.value.code == 2 and re.search(message, printed) and printed.count("\n") == 1


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_file_that_is_no_checkpoint_is_refused_in_one_line_and_its_code_not_run(tmp_path, capsys):
    spirl.save_mae(tmp_path / "mae.pt", spirl.MaskedAutoencoder(), spirl.Args(), {})
    whole = (tmp_path / "mae.pt").read_bytes()
    torch.save({"model": {}, "args": Malicious(tmp_path / "made")}, tmp_path / "code.pt")
    code, noise = (tmp_path / "code.pt").read_bytes(), np.random.default_rng(0).bytes(1000)
    for content in (b"", whole[: len(whole) // 2], noise, code):
        (tmp_path / "bad.pt").write_bytes(content)
        with pytest.raises(SystemExit) as exit:
            spirl.read_checkpoint(tmp_path / "bad.pt")
        printed = capsys.readouterr().err
        assert exit.value.code == 2 and "bad.pt cannot be read as a checkpoint" in printed and printed.count("\n") == 1
    assert not (tmp_path / "made").exists()


def test_sincos_positions_against_loops():
    dim, side = 16, 3
    positions = spirl.sincos_positions(dim, side)
    assert positions.shape == (1 + side * side, dim) and not positions[0].any()
    for row in range(side):
        for column in range(side):
            for half, place in ((0, column), (1, row)):  # the column first
                for k in range(dim // 4):
                    angle = place / 10000 ** (k / (dim / 4))
                    got = positions[1 + row * side + column, half * dim // 2 :]
                    assert got[k] == pytest.approx(math.sin(angle), abs=1e-6)
                    assert got[dim // 4 + k] == pytest.approx(math.cos(angle), abs=1e-6)


def test_patches_are_squares_row_by_row():
    frames = torch.randint(256, (2, 24, 24, 3), dtype=torch.uint8)
    patches = spirl.MaskedAutoencoder(image_size=24, patch_size=8).patchify(frames)
    for i in range(3):
        for j in range(3):
            square = frames[:, 8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
            assert torch.equal(patches[:, 3 * i + j], square.reshape(2, -1) / 255)


@pytest.mark.parametrize("frames", [
    torch.zeros(2, 3, 24, 24, dtype=torch.uint8),  # channels first
    torch.zeros(2, 24, 24, 3),  # in [0, 1] already
    torch.zeros(2, 24, 32, 3, dtype=torch.uint8),  # of another size
    torch.zeros(24, 24, 3, dtype=torch.uint8),  # not a batch
])
def test_frames_of_another_kind_are_refused_with_what_is_wanted(frames):
    mae = spirl.MaskedAutoencoder(image_size=24, encoder_depth=1, decoder_depth=1)
    with pytest.raises(ValueError, match=r"must be torch.uint8 of shape \(B, 24, 24, 3\)"):
        mae(frames)
    with pytest.raises(ValueError, match="image_size is 225; it must be a multiple of patch_size, 8"):
        spirl.MaskedAutoencoder(image_size=225)


def test_grey_images_and_many_small_patches():
    mae = spirl.MaskedAutoencoder(image_size=80, patch_size=2, encoder_depth=1, decoder_depth=1, channels=1)
    loss, prediction, _ = mae(torch.randint(256, (1, 80, 80, 1), dtype=torch.uint8), 0.9)
    assert prediction.shape == (1, 1600, 4) and loss.isfinite()
    mae = spirl.MaskedAutoencoder(image_size=300, patch_size=1, encoder_depth=1, decoder_depth=1)
    hashes = spirl.ErrorMapCache(mae).hashes(torch.zeros(1, 300, 300, 3, dtype=torch.uint8))
    assert len(set(hashes)) == 90_000  # a place is part of the key, more than 255 a side too


@torch.no_grad()
def layer_norm(x, module):
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    return [(value - mean) / math.sqrt(variance + 1e-6) * float(w) + float(b)
            for value, w, b in zip(x, module.weight, module.bias)]


@torch.no_grad()
def linear(x, module):
    return [sum(float(w) * value for w, value in zip(row, x)) + float(b)
            for row, b in zip(module.weight, module.bias)]


def oracle_block(X, block, heads):
    """One Transformer layer as the paper's Background writes it: lists of lists, loops, no tensors."""
    dim = len(X[0])
    d = dim // heads
    projected = [linear(layer_norm(x, block.norm1), block.attn.qkv) for x in X]
    Z = []
    for i, x in enumerate(X):
        concatenated = []
        for head in range(heads):
            at = slice(head * d, head * d + d)
            q, K, V = projected[i][:dim][at], [p[dim:][at] for p in projected], [p[2 * dim :][at] for p in projected]
            scores = [math.exp(sum(a * b for a, b in zip(q, k)) / math.sqrt(d)) for k in K]
            concatenated += [sum(s * v[c] for s, v in zip(scores, V)) / sum(scores) for c in range(d)]
        x = [a + b for a, b in zip(x, linear(concatenated, block.attn.proj))]
        hidden = [h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in linear(layer_norm(x, block.norm2), block.mlp.fc1)]
        Z.append([a + b for a, b in zip(x, linear(hidden, block.mlp.fc2))])
    return Z


def test_a_block_against_the_papers_equations():
    torch.manual_seed(0)
    block = spirl.Block(8, 2)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.5)
    X = torch.randn(5, 8)
    expected = torch.tensor(oracle_block(X.tolist(), block, 2))
    with torch.no_grad():
        torch.testing.assert_close(block(X[None])[0], expected, rtol=1e-4, atol=1e-4)
        # a masked token is as good as absent
        mask = torch.tensor([[True, True, False, True, False]])
        seen = torch.tensor(oracle_block(X[mask[0]].tolist(), block, 2))
        torch.testing.assert_close(block(X[None], mask[:, 1:])[0, mask[0]], seen, rtol=1e-4, atol=1e-4)


def test_every_layer_begins_with_xavier_uniform_weights_and_zero_biases():
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder()
    layers = [layer for layer in mae.modules() if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(layers) == 1 + 6 * 4 + 2
    for layer in layers:
        weight = layer.weight.flatten(1)  # (out, in); of the convolution (64, 3 * 8 * 8)
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.97 * bound < weight.abs().max() <= bound and not layer.bias.any(), layer
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), layer
    drawn = [torch.cat([each.cls_token.flatten(), each.mask_token.flatten()])
             for each in (spirl.MaskedAutoencoder(image_size=24) for _ in range(10))]
    assert torch.stack(drawn).std().item() == pytest.approx(0.02, rel=0.1)


def test_the_loss_is_equation_1_over_all_patches():
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder(image_size=24)
    frames = torch.randint(256, (2, 24, 24, 3), dtype=torch.uint8)
    loss, prediction, mask = mae(frames, 0.5, torch.Generator().manual_seed(1))
    assert prediction.shape == (2, 9, 192) and mask.shape == (2, 9)
    assert (mask == 0).sum(1).tolist() == [4, 4]  # int(9 * 0.5) kept
    total = 0.0
    for b in range(2):
        for n in range(9):
            patch = mae.patchify(frames)[b, n].double().numpy()
            normalised = (patch - patch.mean()) / math.sqrt(patch.var(ddof=1) + 1e-6)  # Eq. (2)
            total += ((normalised - prediction[b, n].detach().double().numpy()) ** 2).sum() / 192  # Eq. (1)
    assert loss.item() == pytest.approx(total / 18, rel=1e-5)


@torch.no_grad()
def oracle_mae(mae, frame, kept, heads):
    """The decoder's patches, (N, p*p*3), of one frame (H, W, 3) of which the encoder sees the patches `kept`: loops."""
    side, p = mae.side, mae.patch_size

    def position(dim, place):
        half = [[wave(at / 10000 ** (k / (dim / 4))) for wave in (math.sin, math.cos) for k in range(dim // 4)]
                for at in (place % side, place // side)]  # the column, then the row
        return half[0] + half[1]

    def plus(x, y):
        return [a + b for a, b in zip(x, y, strict=True)]

    kernel, bias = mae.patch_embed.proj.weight, mae.patch_embed.proj.bias
    X = [mae.cls_token.flatten().tolist()]  # [cls] has no position
    for place in kept:
        square = frame[place // side * p :, place % side * p :][:p, :p].double() / 255
        embedded = [float(bias[d]) + sum(float(kernel[d, colour, y, x]) * float(square[y, x, colour]) for y in range(p)
                                         for x in range(p) for colour in range(3)) for d in range(len(bias))]
        X.append(plus(embedded, position(len(bias), place)))
    for block in mae.blocks:
        X = oracle_block(X, block, heads)
    Y = [linear(layer_norm(x, mae.norm), mae.decoder_embed) for x in X]
    width = len(Y[0])
    mask = mae.mask_token.flatten().tolist()
    tokens = [plus(Y[1 + kept.index(n)] if n in kept else mask, position(width, n)) for n in range(side * side)]
    Z = [Y[0]] + tokens
    for block in mae.decoder_blocks:
        Z = oracle_block(Z, block, heads)
    return torch.tensor([linear(layer_norm(z, mae.decoder_norm), mae.decoder_pred) for z in Z[1:]])


def test_the_whole_auto_encoder_against_loops():
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder(image_size=12, patch_size=4, encoder_dim=8, encoder_depth=2, encoder_heads=2,
                                  decoder_dim=12, decoder_depth=2, decoder_heads=2)
    with torch.no_grad():
        for p in mae.parameters():  # larger than at the start, biases and LayerNorms too
            p.add_(torch.randn_like(p) * 0.3)
    frames = torch.randint(256, (2, 12, 12, 3), dtype=torch.uint8)
    _, prediction, mask = mae(frames, 0.5, torch.Generator().manual_seed(1))
    for frame, got, removed in zip(frames, prediction, mask):
        kept = (removed == 0).nonzero()[:, 0].tolist()
        torch.testing.assert_close(got, oracle_mae(mae, frame, kept, 2), rtol=1e-4, atol=1e-4)


def test_the_encoder_sees_only_the_kept_patches():
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder(image_size=24)
    frames = torch.randint(256, (1, 24, 24, 3), dtype=torch.uint8)
    _, prediction, mask = mae(frames, 0.5, torch.Generator().manual_seed(1))
    hidden = int(mask[0].nonzero()[0])
    changed = frames.clone()
    row, column = hidden // 3 * 8, hidden % 3 * 8
    changed[:, row : row + 8, column : column + 8] ^= 255
    assert torch.equal(mae(changed, 0.5, torch.Generator().manual_seed(1))[1], prediction)
    kept = int((mask[0] == 0).nonzero()[0])
    frames[:, kept // 3 * 8, kept % 3 * 8] ^= 255
    assert not torch.equal(mae(frames, 0.5, torch.Generator().manual_seed(1))[1], prediction)


def test_the_learning_rate_warms_up_and_falls_to_zero():
    rates = [spirl.warmup_cosine(step, 1000, 2.0) for step in range(1001)]
    assert rates[0] == 0 and rates[50] == pytest.approx(1.0) and rates[100] == 2.0 == max(rates)
    assert rates[550] == pytest.approx(1.0) and rates[1000] == pytest.approx(0.0)  # half a cosine


def test_the_optimiser_is_that_of_table_5(random_play, monkeypatch, tmp_path):
    made, ratios = [], []

    class Recorder(torch.optim.AdamW):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    mae = spirl.MaskedAutoencoder(encoder_depth=1, decoder_depth=1)
    mae.register_forward_pre_hook(lambda module, inputs: ratios.append(inputs[1]))
    args = spirl.Args(mae_epochs=2, mae_batch_size=16, mae_learning_rate=3e-3, mae_weight_decay=0.07,
                      mae_mask_ratio=0.6)
    frames = torch.from_numpy(random_play["ALE/Frostbite-v5"][:100])
    spirl.pretrain_mae(args, mae, frames, frames[:16], tmp_path)
    names = {id(p): name for name, p in mae.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in made[0].param_groups for p in group["params"]}
    assert decay == {name: 0.0 if "norm" in name or name.endswith("bias") else 0.07 for name in names.values()}
    assert all(group["betas"] == (0.9, 0.95) for group in made[0].param_groups)
    # 6 batches an epoch; the last of 12 steps, after 1.2 of warm-up, of lr = base lr * batch / 256
    last = 3e-3 * 16 / 256 * 0.5 * (1 + math.cos(math.pi * (11 - 1.2) / (12 - 1.2)))
    assert all(group["lr"] == pytest.approx(last) for group in made[0].param_groups)
    assert set(ratios) == {0.6} and len(ratios) == 12 + 2  # the held-out loss too, once an epoch


def test_pretraining_on_real_frames_lowers_the_held_out_loss(random_play, tmp_path):
    frames = torch.from_numpy(np.concatenate([random_play[game][::10] for game in random_play]))
    torch.manual_seed(0)
    mae = spirl.MaskedAutoencoder(encoder_depth=1, decoder_depth=1)
    args = spirl.Args(mae_epochs=3, mae_batch_size=32, mae_learning_rate=8e-3)
    held_out = torch.from_numpy(np.concatenate([random_play[game][2::45] for game in random_play]))
    losses = spirl.pretrain_mae(args, mae, frames, held_out, tmp_path)
    assert losses["loss"][0] > 0.9  # at first no better than each patch's mean, zero after Eq. (2)
    zero = spirl.normalize_patches(mae.patchify(held_out)).square().mean().item()
    assert len(losses["loss"]) == 15 and len(losses["held_out_loss"]) == 3
    assert losses["held_out_loss"][-1] < zero


def test_the_mask_ratio_is_spread_over_the_batches(random_play, tmp_path):
    ratios, frames = [], torch.from_numpy(random_play["ALE/Frostbite-v5"][:160])
    mae = spirl.MaskedAutoencoder(encoder_depth=1, decoder_dim=32, decoder_depth=1)
    mae.register_forward_pre_hook(lambda module, inputs: ratios.append(inputs[1]))
    args = spirl.Args(mae_epochs=5, mae_batch_size=8, mae_mask_ratio=0.7, mae_mask_spread=0.25)
    spirl.pretrain_mae(args, mae, frames, frames[:8], tmp_path)
    held_out, drawn = ratios[20::21], np.delete(ratios, slice(20, None, 21))  # 20 batches an epoch
    assert held_out == [0.7] * 5 and len(drawn) == len(set(drawn)) == 100
    counts, _ = np.histogram(drawn, 5, (0.45, 0.95))
    assert counts.sum() == 100 and counts.min() > 8  # 20 each, but for chance


def test_pretraining_stops_at_what_is_not_finite(random_play, tmp_path):
    frames = torch.from_numpy(random_play["ALE/Frostbite-v5"][:64])
    mae = spirl.MaskedAutoencoder(encoder_depth=1, decoder_depth=1)
    with torch.no_grad():
        mae.decoder_pred.weight.fill_(3e19)  # the loss is finite, its gradient overflows
    before = {name: value.clone() for name, value in mae.state_dict().items()}
    with pytest.raises(RuntimeError, match="non-finite"):
        spirl.pretrain_mae(spirl.Args(), mae, frames, frames, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in mae.state_dict().items())


def test_pretraining_goes_on_from_its_checkpoint(random_play, tmp_path, monkeypatch):
    """Stopped in its third epoch, it ends with the same weights and losses, bit for bit, as if it had not been."""
    frames = torch.from_numpy(random_play["ALE/Frostbite-v5"][:100])
    args = spirl.Args(mae_epochs=4, mae_batch_size=32, mae_mask_spread=0.2)

    def train(seed, folder, resume=False):
        torch.manual_seed(seed)
        mae = spirl.MaskedAutoencoder(encoder_depth=1, decoder_depth=1)
        return spirl.pretrain_mae(args, mae, frames, frames[:16], folder, resume), mae.state_dict()

    losses, weights = train(0, tmp_path / "whole")
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def stop(*args, **kwargs):
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return clip(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", stop)
    with pytest.raises(KeyboardInterrupt):
        train(0, tmp_path / "stopped")
    again, others = train(1, tmp_path / "stopped", resume=True)
    assert again == losses and len(losses["loss"]) == 12 and len(calls) == 8 + 6
    assert all(torch.equal(others[name], weights[name]) for name in weights)
    anew, _ = train(2, tmp_path / "stopped")  # unless it is asked to continue it begins, whatever the folder holds
    assert len(calls) == 8 + 6 + 12 and anew["loss"][0] != losses["loss"][0]


def test_fewer_frames_than_a_batch_are_refused(tmp_path):
    frames = torch.zeros(10, 96, 96, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"there are 10 frames; a batch \(mae_batch_size\) needs 64"):
        spirl.pretrain_mae(spirl.Args(), spirl.MaskedAutoencoder(), frames, frames, tmp_path)
