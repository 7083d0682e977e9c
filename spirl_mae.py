"""SPIRL's first half: learn without reward which patches of an Atari game are salient, and show it.

Jiang & Weng, "Unsupervised Salient Patch Selection for Data-Efficient Reinforcement Learning", ECML 2023, whose tables
and figures are named below: a masked auto-encoder (MAE) learns to rebuild frames of a random policy from a quarter of
their patches (Fig. 1). A patch that it cannot rebuild from the patches around it is salient, and the Lorenz curve of a
frame's errors says how many are (Fig. 3). There is no reinforcement learning here: `spirl_rainbow.py --mae-checkpoint`
takes the mae.pt that this saves.

    The paper's pre-training, on Frostbite:
        python spirl_mae.py
    Another game, as the MAEs of tests/weights/ were made (Frostbite's: 50 epochs):
        python spirl_mae.py --env-id ALE/Pong-v5 --mae-epochs 8 --mae-mask-spread 0.21
    Draw what a MAE that is here already finds salient:
        python spirl_mae.py --mae-checkpoint tests/weights/Frostbite.pt --mae-frames 500

Sections: 1 arguments, 2 environment, 3 model and pre-training, 4 selection, 5 figures, 6 files and the command line,
7 main. What the three scripts share has the same text in each, so some of it here is for the other two alone:
`residual`, the random streams from PLAY on, words on the replay and the learner, the yellow of `mark_patches`.

Shape letters, with their values at the paper's sizes:
    B     batch (64)
    H, W  height and width of a frame (96)
    N     patches of a frame (144)
    C     values of a patch (192 = 8 x 8 x 3)
    V     visible patches, which the encoder is given (36 in pre-training, 8 in Eq. (3))
    K     patches of a frame that were selected
    M     3x3 neighbourhoods of patches
    T     tokens
    D     width of a layer (encoder 64, decoder 128)
    h     attention heads of a layer (4, 8)
    d     width of a head, D / h (16)
"""

import argparse
import difflib
import json
import math
import os
import signal
import sys
import time
import zlib
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # a notebook sets it to a backend that may be missing here; files need none

import ale_py
import gymnasium as gym
import matplotlib
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

gym.register_envs(ale_py)


# --------------------------------------------------------------------------------------------------------- 1. Arguments
# A field is a flag of the command line, and the comment beside or above it is what --help says of it.
@dataclass
class RunArgs:
    """What to run, and where."""

    env_id: str = "ALE/Frostbite-v5"  # the Atari game; the paper plays Frostbite, MsPacman, Seaquest and BattleZone
    seed: int = 1  # seed of all that is random: weights, masks, games, noise
    mae_checkpoint: str | None = None  # skip pre-training: a mae.pt of this game and sizes, or the authors' checkpoint
    run_name: str = ""  # name of the run's folder in runs/; without one {game}__{script}__{seed}__{time}
    resume: str | None = None  # folder of an unfinished run to go on with; only --device and --threads may change
    device: str = "auto"  # auto (CUDA if there is one, else cpu), cpu, cuda or cuda:N; an error if missing
    threads: int = 1  # CPU threads for PyTorch; more gain little, and lose much where other programs are at work


@dataclass
class PretrainingArgs:
    """How the auto-encoder is made."""

    mae_frames: int | None = None  # frames of random play; if not given, 5,000 for Frostbite, else 50,000 (Table 6)
    mae_epochs: int = 50  # passes over those frames, the first tenth with learning-rate warm-up (Table 5)
    mae_batch_size: int = 64  # frames per pre-training step (Table 5)
    mae_learning_rate: float = 1e-3  # base learning rate; the one used is this * mae_batch_size / 256 (Table 5)
    mae_weight_decay: float = 0.05  # AdamW's weight decay on everything but biases and LayerNorm (Table 5)
    mae_mask_ratio: float = 0.75  # share of the patches hidden from the encoder in pre-training (Table 5)
    mae_mask_spread: float = 0.0  # ours: each batch's mask ratio varies at random by up to this (0.21: 54 to 96 %)
    max_episode_frames: int = 108_000  # game frames after which a game is cut off (Table 9)
    image_size: int = 96  # side of the square RGB frames, in pixels (Table 4)
    patch_size: int = 8  # side of a patch, in pixels (Table 4)
    encoder_dim: int = 64  # width of the encoder and of a patch's embedding (Table 4)
    encoder_depth: int = 3  # Transformer layers of the encoder (Table 4)
    encoder_heads: int = 4  # attention heads of the encoder (Table 4)
    decoder_dim: int = 128  # width of the decoder (Table 4)
    decoder_depth: int = 3  # Transformer layers of the decoder (Table 4)
    decoder_heads: int = 8  # attention heads of the decoder (Table 4)


@dataclass
class SelectionArgs:
    """Which patches of a frame are salient."""

    # largest share of patches kept; if not given, Table 13's or, for other games, mr*, the smallest of 5 %, 10 %, ...
    # that keeps all salient patches of nearly all frames of random play
    max_ratio: float | None = None
    # dynamic-K keeps the patches whose error is above about this share of the frame's mean: the slope at which it cuts
    # the Lorenz curve. The paper's 45 degrees are a slope of 1; the authors' code in effect cuts at 0.5, as we do
    lorenz_slope: float = 0.5
    # mr* keeps every salient patch of more than this share of the frames (Appendix B.5); spirl_rainbow.py uses 0.999
    coverage: float = 0.999


@dataclass
class Args(RunArgs, PretrainingArgs, SelectionArgs):
    """All flags: each base class is a group of them in --help."""


PAPER_MAE_FRAMES = {"ALE/Frostbite-v5": 5_000}  # Table 6; 50,000 for every other game
PAPER_MAX_RATIO = {  # the adopted ratios of Table 13; mr* for every other game
    "ALE/Frostbite-v5": 0.35,
    "ALE/MsPacman-v5": 0.30,
    "ALE/Seaquest-v5": 0.20,
    "ALE/BattleZone-v5": 0.30,
}


# ------------------------------------------------------------------------------------------------------- 2. Environment
# Each purpose has its own random streams, so that evaluating more often never changes what training sees. COLLECT and
# PRETRAIN: the MAE's frames and masks; PLAY: games that are trained on; ACT: the random actions before learning; LEARN:
# noise and sampling; EVALUATE: the reported games.
COLLECT, PRETRAIN, PLAY, ACT, LEARN, EVALUATE = range(6)


def make_envs(args, num_envs):
    """`num_envs` Atari games (Table 9) as one vector environment: uint8 RGB observations (num_envs, 1, H, W, 3), raw
    rewards. Seeds go to `reset`. `terminations` and `truncations` are of games; a lost life shows in `info["lives"]`
    alone. The step after a game's end ignores its action and resets the game, unless `reset` is called before."""
    return gym.make_vec(
        args.env_id,
        num_envs,
        vectorization_mode="vector_entry_point",  # ale-py's AtariVectorEnv; its defaults are not the paper's
        img_height=args.image_size,
        img_width=args.image_size,
        grayscale=False,
        stack_num=1,  # the replay stacks: each frame is then embedded and stored once
        frameskip=4,
        maxpool=True,
        noop_max=30,  # ale-py draws 0 to 29 (before a FIRE 0 to 28)
        use_fire_reset=True,
        full_action_space=False,
        repeat_action_probability=0.0,  # the registered v5 default is 0.25, "sticky actions"
        reward_clipping=False,  # the learner clips; the score stays raw
        episodic_life=False,  # it would restart the game at each life loss: the agent would never see a second life
        life_loss_info=False,  # its flags leave out some lost lives: the learner compares the numbers of lives
        max_num_frames_per_episode=args.max_episode_frames,
    )


def game_seeds(seed, *purpose, num=1):
    """int64 seeds (num,) below 2**31, for `AtariVectorEnv.reset` or a torch.Generator. `purpose`: a constant above,
    then for instance the game's number. A game's seed only sets its opening no-ops, at most 29, so fifty games have
    about 24 different starts."""
    seeds = np.random.SeedSequence([seed, *purpose]).generate_state(num, np.uint32)
    return seeds.astype(np.int64) >> 1


# -------------------------------------------------------------------------------------------- 3. Model and pre-training
def sincos_positions(dim, side):
    """Fixed 2-D sine-cosine positions (1 + side**2, dim), dim a multiple of 4: zeros for [cls], then patches row by
    row. The first half of the width encodes the column, the second half the row, each as [sin | cos]."""
    exponent = torch.arange(dim // 4, dtype=torch.float64) / (dim // 4)  # (dim/4,), 0 to below 1
    frequency = 10000.0**-exponent
    angle = torch.arange(side)[:, None] * frequency  # (side, dim/4)
    axis = torch.cat([angle.sin(), angle.cos()], 1)  # (side, dim/2)
    columns = axis.repeat(side, 1)  # (N, dim/2)
    rows = axis.repeat_interleave(side, 0)
    patches = torch.cat([columns, rows], 1)  # (N, dim)
    return torch.cat([torch.zeros(1, dim), patches]).float()


class Block(nn.Module):
    """A pre-LN Transformer layer (B, T, D) -> (B, T, D): x' = x + MHSA(LN(x)), z = x' + MLP(LN(x')), without the two
    skips if `residual` is False. The first token is [cls]; no token attends to patches where `present` (B, T-1) is
    False. z is computed for the tokens x[rows] only, by default all; these still attend to every token."""

    def __init__(self, dim, heads, residual=True):
        super().__init__()
        self.heads = heads
        self.residual = residual
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})

    def queries_keys_values(self, x):
        """Queries, keys and values of all tokens, (B, T, h, d) each."""
        qkv = self.attn.qkv(self.norm1(x))  # (B, T, 3 D)
        return qkv.unflatten(2, (3, self.heads, -1)).unbind(2)

    def forward(self, x, present=None, rows=slice(None)):
        mask = None
        if present is not None:
            mask = F.pad(present, (1, 0), value=True)[:, None, None]  # (B, 1, 1, T): [cls] is always attended to
        q, k, v = self.queries_keys_values(x)
        x = x[rows]
        q = q[rows].transpose(1, 2)  # (B, h, T, d), of `rows` only
        k = k.transpose(1, 2)  # (B, h, T, d)
        v = v.transpose(1, 2)
        mhsa = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mhsa = self.attn.proj(mhsa.transpose(1, 2).flatten(2))
        x = x + mhsa if self.residual else mhsa
        out = self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(x))))  # (B, T, D), by way of (B, T, 4 D)
        return x + out if self.residual else out


def normalize_patches(patches):
    """Eq. (2): each patch (..., C) minus its own mean, over its own (unbiased) standard deviation."""
    mean = patches.mean(-1, keepdim=True)
    variance = patches.var(-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


def initialize(layer):
    """Xavier-uniform weights and zero biases, as in the authors' code (whose convolution keeps PyTorch's biases)."""
    if isinstance(layer, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(layer.weight.flatten(1))  # in place; a convolution as a linear map of its patches
        nn.init.zeros_(layer.bias)


class MaskedAutoencoder(nn.Module):
    """A small MAE (He et al. 2022; Table 4): a narrow encoder sees some patches, a wider decoder rebuilds all of them.
    790,784 trainable parameters at the paper's sizes. Module names are facebookresearch/mae's: its state dicts load,
    at the same sizes. Raises ValueError unless image_size is a multiple of patch_size."""

    def __init__(
        self,
        image_size=96,
        patch_size=8,
        encoder_dim=64,
        encoder_depth=3,
        encoder_heads=4,
        decoder_dim=128,
        decoder_depth=3,
        decoder_heads=8,
        channels=3,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size is {image_size}; it must be a multiple of patch_size, {patch_size}")
        self.image_shape = (image_size, image_size, channels)
        self.patch_size = patch_size
        self.side = image_size // patch_size  # patches per side
        self.num_patches = self.side**2

        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(channels, encoder_dim, patch_size, stride=patch_size)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, encoder_dim) * 0.02)
        self.register_buffer("pos_embed", sincos_positions(encoder_dim, self.side)[None])  # (1, 1+N, D)
        self.blocks = nn.ModuleList(Block(encoder_dim, encoder_heads) for _ in range(encoder_depth))
        self.norm = nn.LayerNorm(encoder_dim, eps=1e-6)

        self.decoder_embed = nn.Linear(encoder_dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.randn(1, 1, decoder_dim) * 0.02)
        self.register_buffer("decoder_pos_embed", sincos_positions(decoder_dim, self.side)[None])
        self.decoder_blocks = nn.ModuleList(Block(decoder_dim, decoder_heads) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, channels * patch_size**2)

        self.apply(initialize)

    def patchify(self, frames):
        """Patches (B, N, C) in [0, 1] of uint8 frames (B, H, W, 3), row by row, each flattened as (row, column,
        colour). Raises ValueError for frames of another type or shape: channels come last."""
        if frames.dtype != torch.uint8 or frames.shape[1:] != self.image_shape:
            raise ValueError(
                f"frames are {frames.dtype} of shape {tuple(frames.shape)}; they must be torch.uint8 of shape "
                f"(B, {', '.join(map(str, self.image_shape))})"
            )
        size = self.patch_size
        grid = frames.reshape(len(frames), self.side, size, self.side, size, -1)
        patches = grid.transpose(2, 3)  # (B, row of patches, column of patches, row, column, colour)
        return patches.flatten(3).flatten(1, 2) / 255

    def encode(self, patches, ids, present=None):
        """Encoder outputs (B, 1+V, D), [cls] first, for patches (B, V, C) in [0, 1] at the places ids (B, V). Patches
        where `present` (B, V) is False attend to the others, but are not attended to."""
        proj = self.patch_embed.proj  # its stride is its kernel size: the same linear map of each patch
        weight = proj.weight.permute(0, 2, 3, 1).flatten(1)  # (D, C)
        x = F.linear(patches, weight, proj.bias)  # (B, V, D)
        x = x + self.pos_embed[0, 1:][ids]
        cls = self.cls_token.expand(len(x), -1, -1)
        x = torch.cat([cls, x], 1)
        for block in self.blocks:
            x = block(x, present)
        return self.norm(x)

    def decode(self, latent, ids, wanted=None):
        """All N patches (B, N, C), normalised as in Eq. (2), from encode's `latent` (B, 1+V, D) and its `ids` (B, V).
        With `wanted` (B,), one patch id a frame, only that patch, (B, C): the last layer then computes no other."""
        x = self.decoder_embed(latent)  # (B, 1+V, D)
        frame = torch.arange(len(x), device=x.device)[:, None]  # (B, 1)
        tokens = self.mask_token.repeat(len(x), self.num_patches, 1)  # (B, N, D)
        tokens[frame, ids] = x[:, 1:]
        x = torch.cat([x[:, :1], tokens], 1) + self.decoder_pos_embed  # (B, 1+N, D)
        *blocks, last = self.decoder_blocks
        for block in blocks:
            x = block(x)
        if wanted is None:
            x = last(x)[:, 1:]  # without [cls]
        else:
            x = last(x, rows=(frame, 1 + wanted[:, None])).squeeze(1)  # (B, D); [cls] is token 0
        return self.decoder_pred(self.decoder_norm(x))

    def forward(self, frames, mask_ratio=0.75, generator=None):
        """Eq. (1) for uint8 frames (B, H, W, 3): (loss, prediction (B, N, C), mask (B, N): 0 keep, 1 removed). The loss
        is over all patches, visible and masked. `generator`, on the frames' device, draws the masks."""
        patches = self.patchify(frames)
        noise = torch.rand(patches.shape[:2], device=patches.device, generator=generator)
        num_visible = int(self.num_patches * (1 - mask_ratio))
        ids = noise.argsort(1)[:, :num_visible]  # (B, V), a random subset
        visible = patches.take_along_dim(ids[..., None], 1)  # (B, V, C)
        prediction = self.decode(self.encode(visible, ids), ids)
        loss = F.mse_loss(prediction, normalize_patches(patches))  # Eq. (1), averaged over patches (the paper: summed)
        mask = torch.ones_like(noise).scatter(1, ids, 0.0)
        return loss, prediction, mask


HELD_OUT_FRAMES = 256  # validation set: collected after the training frames and never trained on


def collect_random_frames(args, num_frames):
    """uint8 frames (num_frames, H, W, 3) of uniformly random play, first lives only: a lost life starts a new
    game, as in the authors' collector. (BattleZone's screen flashes after a lost life, and a flash is salient.)"""
    env = make_envs(args, 1)
    rng = np.random.default_rng([args.seed, COLLECT])
    frames = torch.empty(num_frames, args.image_size, args.image_size, 3, dtype=torch.uint8)
    num_games = 0
    over = True
    for i in tqdm(range(num_frames), "collecting frames"):
        if over:
            observation, info = env.reset(seed=game_seeds(args.seed, COLLECT, num_games))
            num_games += 1
        frames[i] = torch.from_numpy(observation[0, 0])
        action = rng.integers(env.single_action_space.n, size=1)
        lives = info["lives"][0]
        observation, _, terminated, truncated, info = env.step(action)
        over = terminated[0] or truncated[0] or info["lives"][0] < lives
    env.close()
    return frames


def warmup_cosine(step, steps, peak):
    """Learning rate at `step` of `steps`: linear warm-up for the first tenth (Table 5: 5 of 50 epochs), then half a
    cosine down to 0, as He et al. 2022."""
    warmup = steps / 10
    if step < warmup:
        return peak * (step / warmup)
    angle = math.pi * (step - warmup) / (steps - warmup)  # 0 to pi
    return peak * (0.5 + 0.5 * math.cos(angle))


def pretrain_mae(args, mae, frames, held_out, folder):
    """Train `mae` in place on uint8 frames (num_frames, H, W, 3) as in Table 5. Returns its losses on the frames
    `held_out`, a list, one per epoch.

    `folder`, a Path, gets TensorBoard's curves and, after each epoch, checkpoint.pt; with args.resume it goes on there.
    With args.mae_mask_spread the MAE also learns to rebuild from few patches, as Eq. (3) asks it to: 8 of 144, not 36.
    Raises ValueError for fewer frames than a batch, RuntimeError where a gradient is not finite.
    """
    if len(frames) < args.mae_batch_size:
        raise ValueError(f"there are {len(frames)} frames; a batch (mae_batch_size) needs {args.mae_batch_size}")
    device = mae.pos_embed.device
    parameters = list(mae.parameters())
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    not_decayed = [parameter for parameter in parameters if parameter.ndim <= 1]  # biases and LayerNorm
    groups = [{"params": decayed}, {"params": not_decayed, "weight_decay": 0.0}]
    peak = args.mae_learning_rate * args.mae_batch_size / 256
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), weight_decay=args.mae_weight_decay, fused=True)
    num_batches = len(frames) // args.mae_batch_size  # the last, partial batch of an epoch is dropped
    steps = args.mae_epochs * num_batches
    held_out_losses = []

    path = folder / "checkpoint.pt"
    if args.resume and path.exists():
        checkpoint = read_checkpoint(path)
        mae.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        held_out_losses = checkpoint["held_out_losses"]
    first_epoch = len(held_out_losses)

    writer = SummaryWriter(folder, purge_step=first_epoch * num_batches)  # drops what was logged after the checkpoint
    progress = tqdm(desc="pre-training", total=steps, initial=first_epoch * num_batches)
    for epoch in range(first_epoch, args.mae_epochs):
        rng = np.random.default_rng([args.seed, PRETRAIN, epoch])
        order = torch.from_numpy(rng.permutation(len(frames)))
        mask_generator = torch.Generator(device).manual_seed(game_seeds(args.seed, PRETRAIN, epoch).item())

        batches = order.split(args.mae_batch_size)[:num_batches]
        for step, batch in enumerate(batches, epoch * num_batches):
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, steps, peak)
            mask_ratio = args.mae_mask_ratio + args.mae_mask_spread * rng.uniform(-1, 1)
            loss = mae(frames[batch].to(device), mask_ratio, mask_generator)[0]
            optimizer.zero_grad()
            loss.backward()
            # Clips nothing, but raises RuntimeError where a gradient is not finite.
            nn.utils.clip_grad_norm_(parameters, math.inf, error_if_nonfinite=True)
            optimizer.step()
            writer.add_scalar("mae/loss", loss, step)
            progress.update()

        with torch.no_grad():
            generator = torch.Generator(device).manual_seed(0)  # the same masks in each epoch
            held_out_loss = mae(held_out.to(device), args.mae_mask_ratio, generator)[0].item()
        held_out_losses.append(held_out_loss)
        writer.add_scalar("mae/held_out_loss", held_out_loss, step)
        writer.flush()
        progress.set_postfix(held_out_loss=held_out_loss)
        checkpoint = {
            "model": mae.state_dict(),
            "optimizer": optimizer.state_dict(),
            "held_out_losses": held_out_losses,
        }
        save(checkpoint, path)
    progress.close()
    writer.close()
    return held_out_losses


# --------------------------------------------------------------------------------------------------------- 4. Selection
def surrounding_patches(side):
    """surr(i, j): for each of the side**2 patches a list of the ids of the 8 around it (5 on an edge, 3 in a corner).
    The paper's formula, read literally, gives the four diagonal ones; its figures and the authors' code have all 8."""
    places = np.arange(side**2).reshape(side, side)
    surroundings = []
    for row, column in product(range(side), repeat=2):
        around = places[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2].flatten().tolist()
        around.remove(side * row + column)
        surroundings.append(around)
    return surroundings


@torch.no_grad()
def rebuild_from_surroundings(mae, frames):
    """Eq. (3): each patch of uint8 frames (B, H, W, 3) as rebuilt from those around it alone, (B, N, C)."""
    patches = mae.patchify(frames)
    rebuilt = torch.empty_like(patches)
    for place, surroundings in enumerate(surrounding_patches(mae.side)):
        ids = torch.tensor(surroundings, device=frames.device).expand(len(frames), -1)
        visible = patches.take_along_dim(ids[..., None], 1)  # (B, 3 to 8, C)
        rebuilt[:, place] = mae.decode(mae.encode(visible, ids), ids)[:, place]
    return rebuilt


def reconstruction_error_map(mae, frames):
    """E (B, N), float32, of uint8 frames (B, H, W, 3): how badly each patch is rebuilt from its surroundings.

    The mean squared difference from the patch's normalised pixels, which is what the MAE learned to rebuild (the
    paper's formula compares with raw pixels and sums the colours). The plain definition, one pass of the whole MAE
    per patch; `ErrorMapCache` gives the same values, up to rounding, far faster.
    """
    target = normalize_patches(mae.patchify(frames))  # Eq. (2)
    return (rebuild_from_surroundings(mae, frames) - target).square().mean(2)


class ErrorMapCache:
    """`reconstruction_error_map` of spirl_mae.py, fast: `cache(frames)` -> E (B, N), float32, how badly a frozen MAE
    rebuilds each patch of the frames from those around it.

    By Eq. (3) a patch's error depends only on its place and on the pixels of the 3x3 patches around it, and most of an
    Atari frame has been seen before. So each neighbourhood goes through the MAE once; after that its error is looked
    up in a dict, by (place, pixels). The keys are 64-bit hashes: the odds that any two of four million neighbourhoods
    share one are below one in a million. At most `capacity` errors are kept (180 bytes each), the newest. Once the MAE
    is trained further or moved to another device, make a new cache.
    """

    def __init__(self, mae, capacity=2**22):
        self.mae = mae
        self.capacity = capacity
        self.errors = OrderedDict()  # hash of (place, pixels): error; the oldest first
        # A patch on the edge has fewer than 8 neighbours: its list is filled up with copies of the first one. `present`
        # is False for a copy: no token attends to it. (A copy's embedding equals the first one's, so it does no harm
        # that `decode` writes both to the same place.)
        surroundings = surrounding_patches(mae.side)
        with mae.pos_embed.device:  # both are made on the MAE's device
            self.surroundings = torch.tensor([ids + ids[:1] * (8 - len(ids)) for ids in surroundings])  # (N, 8)
            self.present = torch.tensor([[i < len(ids) for i in range(8)] for ids in surroundings])  # (N, 8)

    @torch.no_grad()
    def __call__(self, frames):
        """E (B, N), float32, on the CPU, of uint8 frames (B, H, W, 3)."""
        hashes = self.hashes(frames)
        new = {key: index for index, key in enumerate(hashes) if key not in self.errors}  # index = frame * N + place
        if new:
            patches = self.mae.patchify(frames.to(self.surroundings.device))  # (B, N, C)
            indices = torch.tensor(list(new.values()), device=patches.device)  # (M,)
            # 32 at a time, so that many new neighbourhoods take no more memory than a few.
            computed = torch.cat([self.compute(patches, chunk) for chunk in indices.split(32)])
            self.errors.update(zip(new, computed.tolist()))
        errors = torch.tensor([self.errors[key] for key in hashes])
        while len(self.errors) > self.capacity:  # only now: the line above reads old and new ones
            self.errors.popitem(last=False)
        return errors.view(len(frames), -1)

    def hashes(self, frames):
        """Hashes, a list of B*N integers, of the 3x3 neighbourhoods of uint8 frames (B, H, W, 3)."""
        size = self.mae.patch_size
        padded = F.pad(frames.cpu(), (0, 0, size, size, size, size)).numpy()
        hashes = []
        for frame, row, column in product(padded, range(self.mae.side), range(self.mae.side)):
            pixels = frame[size * row : size * (row + 3), size * column : size * (column + 3)]
            digest = blake2b(pixels.tobytes(), digest_size=8, salt=b"%d,%d" % (row, column)).digest()
            hashes.append(int.from_bytes(digest))
        return hashes

    def compute(self, patches, indices):
        """Errors (M,) by Eq. (3) of the patches (B, N, C) at `indices` (M,), each frame * N + place."""
        frame = indices // self.mae.num_patches
        place = indices % self.mae.num_patches
        ids = self.surroundings[place]  # (M, 8)
        visible = patches[frame[:, None], ids]  # (M, 8, C)
        latent = self.mae.encode(visible, ids, self.present[place])
        rebuilt = self.mae.decode(latent, ids, place)  # (M, C)
        return (rebuilt - normalize_patches(patches[frame, place])).square().mean(1)


def select_salient_patches(errors, max_patches, lorenz_slope=0.5):
    """Which patches of each frame to keep, for errors (B, N): (patch_ids (B, max_patches), count (B,)), both int64.

    The first count ids of a row are the selected ones, largest error first, the lower id first among equals. With
    `lorenz_slope=None` count is max_patches (fixed K). Otherwise it is dynamic-K, for each frame:
      1. Sort the N errors in ascending order and divide them by their sum (the paper's formula does not): v_0 ...
         v_{N-1}. Their running sum over x, the share of the patches, is the Lorenz curve, from (0, 0) to (1, 1). It is
         convex (the paper says concave), the salient patches at its steep right end.
      2. The curve's slope over the two steps from i is (v_i + v_{i+1}) N/2, for i = 1 ... N-2.
      3. Take the i whose slope is closest to lorenz_slope, the smallest among equals.
      4. Keep the K = N - i patches with the largest errors, at most max_patches; K = 1 where all errors are equal.
    In short: it keeps the patches whose error is above lorenz_slope times the frame's mean error, and up to two more
    (more only where errors are equal); 2 to N - 1 of them (1 if all are equal), then at most max_patches.
    Example: of the errors 1 10 1 2 1 1 (max_patches 6, slope 1/2) v is 1 1 1 1 2 10 sixteenths, the slopes are 6 6 9 36
    sixteenths, and 9 comes closest to 8: i = 3, K = 3, patches 1, 3, 0.
    N is at least 3; raises ValueError unless 1 <= max_patches <= N.
    """
    B, N = errors.shape
    if not 1 <= max_patches <= N:
        raise ValueError(f"max_patches is {max_patches}; it must be from 1 to the number of patches, {N}")
    patch_ids = errors.sort(dim=1, descending=True, stable=True).indices[:, :max_patches]
    if lorenz_slope is None:
        return patch_ids, patch_ids.new_full((B,), max_patches)
    ascending = errors.double().sort(dim=1).values
    v = ascending / ascending.sum(1, keepdim=True)
    slope = (v[:, 1:-1] + v[:, 2:]) * N / 2  # (B, N-2), for i = 1 ... N-2
    i = 1 + (slope - lorenz_slope).abs().argmin(1)  # argmin takes the first of equals
    count = (N - i).clamp(max=max_patches)
    return patch_ids, torch.where(ascending[:, 0] == ascending[:, -1], 1, count)


def count_salient_patches(mae, frames, lorenz_slope):
    """What mr* is computed from: {"counts": K of each of the uint8 frames (num_frames, H, W, 3), without a maximum,
    "lorenz_slope": the slope it was counted at}. From 10,000 frames on only every (num_frames // 5000)th is counted:
    much faster, but mr* may come out a little different."""
    frames = frames[:: max(1, len(frames) // 5000)]
    error_map = ErrorMapCache(mae)
    errors = torch.cat([error_map(batch) for batch in tqdm(frames.split(64), "counting salient patches")])
    _, counts = select_salient_patches(errors, mae.num_patches, lorenz_slope)
    return {"counts": counts, "lorenz_slope": lorenz_slope}


def ratio_to_patches(ratio, num_patches):
    """Patches that a maximal ratio keeps: that share of all, rounded down. (Without 1e-6, 0.29 of 100 would be 28.)"""
    return int(num_patches * ratio + 1e-6)


def ideal_max_ratio(counts, num_patches, coverage=0.999):
    """mr* (Appendix B.5, Fig. 8): the smallest of 5 %, 10 %, ..., 95 % that keeps all salient patches of more than
    `coverage` of the frames. `counts`: K of each frame, without a maximum. 0.95 if none does."""
    for percent in range(5, 95, 5):
        kept_whole = counts <= ratio_to_patches(percent / 100, num_patches)
        if kept_whole.double().mean() > coverage:
            return percent / 100
    return 0.95


# ----------------------------------------------------------------------------------------------------------- 5. Figures
# Each draw_... returns a Figure; MAE, frames and errors are on the CPU.
BLUE, VERMILION, ORANGE = "#0072b2", "#d55e00", "#e69f00"  # safe for colour-blind readers


@torch.no_grad()
def decoder_pictures(mae):
    """What the decoder paints without a single patch, nor [cls], as in the authors' code: three (N, C), for the tokens
    [mask] + positions, positions alone and [mask] alone (Fig. 2, columns 4 to 6)."""
    positions = mae.decoder_pos_embed[:, 1:]  # (1, N, D)
    pictures = []
    for x in (mae.mask_token + positions, positions, mae.mask_token.expand_as(positions)):
        for block in mae.decoder_blocks:
            x = block(x)
        pictures.append(mae.decoder_pred(mae.decoder_norm(x))[0])
    return pictures


def paint(patches, side):
    """A picture (H, W, 3) in [0, 1] of normalised patches (N, C): -2.5 is black, 0 grey, 2.5 white."""
    size = math.isqrt(patches.shape[1] // 3)
    grid = patches.view(side, side, size, size, 3)  # (row of patches, column of patches, row, column, colour)
    picture = grid.transpose(1, 2).reshape(side * size, side * size, 3)
    return (0.5 + picture / 5).clamp(0, 1).numpy()


def draw_reconstruction(mae, frames):
    """Fig. 2 for uint8 frames (B, H, W, 3): rebuilt from surroundings, error maps, and the decoder on its own."""
    rebuilt = rebuild_from_surroundings(mae, frames)
    errors = reconstruction_error_map(mae, frames)
    decoder_alone = [paint(picture, mae.side) for picture in decoder_pictures(mae)]
    titles = (
        "frame",
        "each patch guessed\nfrom those around it",
        "error of the guess\n(bright: large)",
        "seeing nothing but\n[mask] + positions",
        "seeing nothing but\npositions",
        "seeing nothing but\n[mask]",
    )
    figure = Figure(figsize=(15, 2.55 * len(frames) + 2), layout="constrained")
    figure.suptitle(
        "Painted colours are washed out: the network, a masked auto-encoder, learns each patch minus its mean, over\n"
        "its standard deviation, Eq. (2). How bright it was is lost: a black patch and a white one come out grey.\n"
        "Last three columns: what its decoder paints when it sees no patch, only a token [mask], which stands for\n"
        "a hidden patch, and the patches' positions. From the positions alone it knows the background by heart."
    )
    axes = figure.subplots(len(frames), 6, squeeze=False)
    brightest = errors.max().item()  # one scale for all maps: a bright patch is as salient in one as in another
    for row, frame, patches, error in zip(axes, frames, rebuilt, errors):
        error = error.unflatten(0, (mae.side, -1)).numpy()
        pictures = [frame.numpy(), paint(patches, mae.side), error, *decoder_alone]
        for axis, picture in zip(row, pictures):
            shown = axis.imshow(picture, cmap="viridis", vmin=0, vmax=brightest)  # the limits are for the map alone
            axis.axis("off")
            if picture is error:
                figure.colorbar(shown, ax=axis, shrink=0.8)
    for axis, title in zip(axes[0], titles):
        axis.set_title(title)
    return figure


def mark_patches(frame, selected, attended, side):
    """A NumPy frame (H, W, 3) four times as large, (4 H, 4 W, 3): the selected patches outlined in red, the attended
    ones in yellow, all others dark."""
    picture = frame.repeat(4, 0).repeat(4, 1)
    size = len(picture) // side
    grid = picture.reshape(side, size, side, size, 3)  # a view: painting it paints the picture
    border = np.ones((size, size), bool)
    border[2:-2, 2:-2] = False
    for i in range(side**2):
        patch = grid[i // side, :, i % side]  # (size, size, 3)
        if i in attended:
            patch[border] = (255, 255, 0)  # yellow
        elif i in selected:
            patch[border] = (255, 0, 0)  # red
        else:
            patch //= 3  # dark
    return picture


def draw_selection(mae, frames, errors, fixed_ratios, lorenz_slope):
    """Fig. 3 for uint8 frames (B, H, W, 3) and their errors (B, N), one frame a column: the Lorenz curve with
    dynamic-K's cut, the patches that it keeps, and those of two fixed K."""
    N = mae.num_patches
    patch_ids, count = select_salient_patches(errors, N, lorenz_slope)
    figure = Figure(figsize=(3.6 * len(frames), 15.4), layout="constrained")
    axes = figure.subplots(4, len(frames), squeeze=False)
    for column, frame, error, ids, k in zip(axes.T, frames, errors, patch_ids, count.tolist()):
        curve = F.pad(error.sort().values.cumsum(0), (1, 0)) / error.sum()  # (N+1,)
        axis = column[0]
        label = "Lorenz curve: all patches sorted by error, smallest first; running share of the total error"
        axis.plot(np.arange(N + 1) / N, curve, color=BLUE, linewidth=2.5, label=label)
        share = (N - k) / N
        label = f"slope {lorenz_slope:g}, that of a patch whose error is {lorenz_slope:g} times the frame's mean error"
        axis.axline((share, curve[N - k]), slope=lorenz_slope, color=ORANGE, linewidth=2, label=label)
        label = f"the cut, where the curve gets steeper than slope {lorenz_slope:g}"
        axis.plot(share, curve[N - k], "o", color=VERMILION, markersize=9, label=label)
        label = "kept by dynamic-K: the K patches right of the cut (red squares; here without a maximum)"
        axis.axvspan(share, 1, color="red", alpha=0.15, label=label)
        axis.set_title(f"K = {k} of {N}")
        axis.set_xlabel("share of the patches")
        axis.margins(0.02)
        axis.set_aspect("equal")
        picks = [("dynamic-K:", k)] + [("fixed K: always", ratio_to_patches(ratio, N)) for ratio in fixed_ratios]
        for axis, (name, kept) in zip(column[1:], picks):
            axis.imshow(mark_patches(frame.numpy(), ids[:kept].tolist(), [], mae.side))
            axis.set_title(f"{name} {kept}")
            axis.axis("off")
    axes[0, 0].set_ylabel("share of the total error")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center")
    return figure


def draw_salient_patches(mae, frames, errors, max_patches, lorenz_slope):
    """The patches that the agent would see in twelve frames (12, H, W, 3) with errors (12, N)."""
    patch_ids, count = select_salient_patches(errors, max_patches, lorenz_slope)
    figure = Figure(figsize=(13, 11.6), layout="constrained")
    axes = figure.subplots(3, 4).flat
    for axis, frame, ids, k in zip(axes, frames, patch_ids, count.tolist()):
        axis.imshow(mark_patches(frame.numpy(), ids[:k].tolist(), [], mae.side))
        axis.set_title(f"K = {k} of {mae.num_patches} patches")
        axis.axis("off")
    figure.suptitle(
        "Red squares: the salient patches, which a network, the MAE, guesses badly from the patches around\n"
        "them. (Where one looks empty, the MAE expected something.) The agent will see only these. K is their\n"
        f"number: it differs from frame to frame and is at most {max_patches} here, by the maximal ratio."
    )
    return figure


def draw_max_ratio(counts, num_patches, ideal, adopted, title):
    """Fig. 8: the histogram of `counts` (num_frames,), the K of frames, in steps of 5 % of the patches, with mr* and
    the ratio in use."""
    figure = Figure(figsize=(11, 6.8), layout="constrained")
    axis = figure.subplots()
    # The bin that ends at 35 % holds the frames that a maximal ratio of 35 % keeps whole and 30 % does not.
    limits = [ratio_to_patches(percent / 100, num_patches) for percent in range(0, 101, 5)]
    cumulative = [(counts <= patches).double().mean() for patches in limits]
    axis.bar(np.arange(2.5, 100, 5), 100 * np.diff(cumulative), width=4.6, color=BLUE)
    for name, ratio, colour, style in (("mr*", ideal, VERMILION, "-"), ("maximal ratio in use", adopted, ORANGE, "--")):
        share = (counts <= ratio_to_patches(ratio, num_patches)).double().mean().item()
        label = f"{name} = {100 * ratio:g} %: {100 * share:.2f} % of the frames lose no salient patch"
        axis.axvline(100 * ratio, color=colour, linewidth=3, linestyle=style, label=label)
    axis.set_title(title)
    axis.set_xlabel(f"K, a frame's salient patches, in % of its {num_patches}")
    axis.set_ylabel("% of the frames")
    axis.set_xticks(range(0, 101, 10))
    figure.legend(loc="outside lower center")  # outside, so that it covers no bar
    return figure


# ---------------------------------------------------------------------------------------- 6. Files and the command line
# Nothing here is of the method: whoever reads to learn may go on with main.


@contextmanager
def atomic(path):
    """A temporary path to write to, which becomes `path` after the block: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")  # same suffix: savefig takes the format from it
    yield temporary
    os.replace(temporary, path)


def save(content, path):
    """Write the dict `content` as a .pt file."""
    with atomic(path) as temporary:
        torch.save(content, temporary)


def read_checkpoint(path, device="cpu"):
    """The dict in a .pt file; no code in it is run. Exits with status 2 where it is not one."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # facebookresearch/mae saves its arguments as one
            return dict(torch.load(path, map_location=device, weights_only=True))
    except FileNotFoundError:
        fail(f"there is no file '{path}'; give another")
    except Exception as error:  # a damaged or foreign file can fail in any way
        fail(f"{path} cannot be read as a checkpoint ({type(error).__name__}); give another, or delete a run's own")


def mae_sizes(args):
    """The keyword arguments of MaskedAutoencoder, from `args`."""
    names = "image_size patch_size encoder_dim encoder_depth encoder_heads decoder_dim decoder_depth decoder_heads"
    return {name: getattr(args, name) for name in names.split()}


def load_mae(path, mae, args):
    """Load mae.pt, or a checkpoint of facebookresearch/mae or the authors, into `mae` in place; returns the dict in
    mae.pt, or {} for theirs. Exits with status 2 if it does not fit."""
    content = read_checkpoint(path)
    made_for = {"env_id": content.get("env_id", args.env_id)} | content.get("sizes", {})
    for name, value in made_for.items():
        if value != getattr(args, name, None):
            fail(f"{path} has {name} {value}; give --{name.replace('_', '-')} {value}, or another checkpoint")
    try:
        mae.load_state_dict(content.get("model"))
    except (RuntimeError, TypeError) as error:
        fail(f"{path} does not fit the auto-encoder ({' '.join(str(error).split())[:200]}); give a mae.pt of its sizes")
    return content if "sizes" in content else {}


def fail(message):
    """Print one line about a bad argument to stderr and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_args():
    """The command line as Args; with --resume the arguments of that run, but for --device and --threads given here."""
    # Args' base classes are the groups of --help: tyro fills a dict with one of each. OmitArgPrefixes keeps the groups'
    # names out of the flags. FlagCreatePairsOff: no --no-X beside a flag --X. DisallowNone: "--resume None" is a folder
    # of that name.
    groups = {part.__name__.removesuffix("Args"): part() for part in Args.__bases__}
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    title, about, commands, *_ = __doc__.split("\n\n")  # the first paragraphs at the top of this file
    try:
        parts = tyro.cli(dict, default=groups, description=f"{title}\n\n{about}", config=config)
    except SystemExit as end:
        if not end.code:  # after --help
            print(commands)
        raise
    args = Args()
    for part in parts.values():
        vars(args).update(vars(part))
    if args.resume is None:
        return args
    given = {word[2:].partition("=")[0] for word in sys.argv if word.startswith("--")}
    if given - {"resume", "device", "threads"}:
        fail("--resume uses the run's own arguments; leave out all other flags but --device and --threads")
    changed = {name: getattr(args, name) for name in given}
    try:
        stored = json.loads(Path(args.resume, "args.json").read_text())
        checksum = stored.pop("checksum")
        args = Args(**stored | changed)
    except Exception:  # absent, damaged, or another script's
        fail(f"--resume {args.resume} is not the folder of an unfinished run of this script; give one, runs/NAME")
    if checksum != zlib.crc32(json.dumps(stored).encode()):
        fail(f"--resume {args.resume}: its args.json is not as the run wrote it; put back what was changed")
    return args


def open_run(args, run_dir):
    """Create the run's folder, or take --resume's, lock it, and let Ctrl-C say how to go on. Exits with one line where
    the run is finished, or at work elsewhere. Keep the returned file open: it is the lock, which even a kill frees."""
    if not args.resume:
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            fail(f"--run-name {args.run_name}: {run_dir} already exists; give another name")
        checksum = zlib.crc32(json.dumps(vars(args)).encode())
        with atomic(run_dir / "args.json") as path:
            path.write_text(json.dumps(vars(args) | {"checksum": checksum}, indent=2))
    lock = open(run_dir / "args.json", "r+")  # for writing, or NFS would not lock it
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"--resume {run_dir}: another process is at work on this run; wait for it, or stop it")
    except (ImportError, OSError):  # Windows, or a file system without locks
        pass
    if (run_dir / "results.json").exists():
        fail(f"--resume {run_dir}: this run is finished; give an unfinished one")
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # unless Ctrl-C is ignored
        signal.signal(signal.SIGINT, stop)
    return lock


def stop(*_):
    """Ctrl-C: say what is lost and how to go on, then end at once, as by a kill. Reads main's last_saved, run_dir."""
    message = f"\nstopped; what came after {last_saved} is lost; go on with: python {sys.argv[0]} --resume {run_dir}"
    print(message, file=sys.stderr)
    sys.stdout.flush()
    os._exit(130)


# Flags that are shares, from 0 to 1, and flags that may be 0. One list for all three scripts: each has some of them.
SHARES = (
    "mae_mask_ratio mae_mask_spread max_ratio coverage gamma eval_epsilon priority_exponent priority_weight".split()
)
MAY_BE_0 = SHARES + "seed checkpoint_frequency eval_frequency mae_weight_decay noisy_std".split()


def check_each(args):
    """Exit with one line if any argument is invalid by itself."""
    for name, value in vars(args).items():
        if type(value) not in (int, float) or name in ("v_min", "v_max"):  # these two may be negative
            continue
        limit = 1 if name in SHARES else 2_147_483_647
        zero = "0 or " if name in MAY_BE_0 else ""
        if not (0 < value <= limit or (zero and value == 0)):  # this form also refuses nan
            fail(f"--{name.replace('_', '-')} is {value}; give {zero}a positive number, at most {limit}")

    games = [name for name in gym.registry if name.startswith("ALE/")]
    if args.env_id not in games:
        close = difflib.get_close_matches(args.env_id, games, cutoff=0.0)
        fail(f"--env-id {args.env_id} is not an Atari game of ale-py; the closest names are {', '.join(close)}")
    try:
        f"{args.run_name} {args.resume}".encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        fail("--run-name or --resume has letters that this terminal cannot print; give a name without them")


def check_args(args):
    """Exit with one line if the arguments are invalid. Runs before anything is created."""
    check_each(args)
    if args.mae_checkpoint is not None:
        for name, default in vars(PretrainingArgs()).items():  # K is counted on --mae-frames all the same
            if name.startswith("mae_") and name != "mae_frames" and getattr(args, name) != default:
                fail(f"--{name.replace('_', '-')} is for pre-training: --mae-checkpoint replaces that; give only one")
    num_patches = (args.image_size // args.patch_size) ** 2
    if args.image_size % args.patch_size or num_patches < 9:
        fail(f"--image-size {args.image_size} must be --patch-size {args.patch_size} times a whole number, at least 3")
    for part in ("encoder", "decoder"):
        dim = getattr(args, f"{part}_dim")
        heads = getattr(args, f"{part}_heads")
        if dim % heads or dim % 4:
            fail(f"--{part}-dim {dim} must be a multiple of --{part}-heads {heads} and of 4")
    num_frames = args.mae_frames or PAPER_MAE_FRAMES.get(args.env_id, 50_000)
    if args.mae_checkpoint is None and num_frames < args.mae_batch_size:
        fail(f"--mae-frames {num_frames} must be at least --mae-batch-size {args.mae_batch_size}")
    spread = args.mae_mask_spread
    highest = 1 - 1 / num_patches - spread  # so that the encoder sees a patch
    if not spread <= args.mae_mask_ratio < highest:
        fail(f"--mae-mask-ratio {args.mae_mask_ratio} must be from --mae-mask-spread ({spread}) to below {highest:.3f}")
    if args.max_ratio is not None and ratio_to_patches(args.max_ratio, num_patches) == 0:
        fail(f"--max-ratio {args.max_ratio} must keep at least one of {num_patches} patches")
    if args.coverage == 1:
        fail("--coverage must be below 1: mr* keeps more than that share of the frames whole")


def pick_device(name):
    """The torch.device that `--device` asks for: "auto", "cpu", "cuda" or "cuda:N". Exits with status 2 if absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        probe = torch.zeros(1, device=name)
        probe.double().item()  # fails on a device without float64, and on "meta", which has no values
        return probe.device
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        fail(f"--device {name} cannot be used ({reason}); give auto, cpu, cuda or cuda:N")


# -------------------------------------------------------------------------------------------------------------- 7. Main
if __name__ == "__main__":
    args = parse_args()
    check_args(args)
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    game = gym.spec(args.env_id).name  # without "ALE/" and "-v5"
    run_name = args.run_name or f"{game}__{Path(__file__).stem}__{args.seed}__{int(1000 * time.time())}"
    run_dir = Path(args.resume or f"runs/{run_name}")
    torch.manual_seed(args.seed)
    mae = MaskedAutoencoder(**mae_sizes(args)).to(device)
    # `saved_mae` is what mae.pt will hold. Its tensors are the MAE's own, so pre-training changes them too.
    saved_mae = {"model": mae.state_dict(), "sizes": mae_sizes(args), "env_id": args.env_id, "args": vars(args)}
    if args.mae_checkpoint is not None:
        saved_mae |= load_mae(args.mae_checkpoint, mae, args)  # the file's `args` too: how it was made
    last_saved = "the last checkpoint"  # `stop` reads it
    lock = open_run(args, run_dir)  # the lock lasts while this file is open; nothing is created before this
    print(f"--device {device}, --threads {args.threads}; writing to {run_dir}; if stopped: --resume {run_dir}")
    print(f"{sum(parameter.numel() for parameter in mae.parameters()):,} parameters")

    # Collect random play, and pre-train on it unless --mae-checkpoint names a MAE.
    num_frames = args.mae_frames or PAPER_MAE_FRAMES.get(args.env_id, 50_000)
    frames = collect_random_frames(args, num_frames + HELD_OUT_FRAMES)
    frames, held_out = frames.tensor_split([num_frames])
    held_out_losses = []
    start_time = time.perf_counter()
    if args.mae_checkpoint is None:
        held_out_losses = pretrain_mae(args, mae, frames, held_out, run_dir / "mae")
    seconds = time.perf_counter() - start_time
    mae.eval().requires_grad_(False)

    # How many patches of each frame are salient, and what maximal ratio would keep them all.
    saved_mae["salient_counts"] = count_salient_patches(mae, frames, args.lorenz_slope)
    save(saved_mae, run_dir / "mae.pt")
    counts = saved_mae["salient_counts"]["counts"]
    ideal = ideal_max_ratio(counts, mae.num_patches, args.coverage)
    max_ratio = args.max_ratio or PAPER_MAX_RATIO.get(args.env_id, ideal)
    kept_whole = (counts <= ratio_to_patches(ideal, mae.num_patches)).double().mean().item()  # at mr*

    # The figures, on the CPU: twelve frames spread over the random play.
    matplotlib.rcParams.update({"font.size": 14, "savefig.dpi": 130})
    mae.cpu()
    examples = frames[np.linspace(0, num_frames - 1, 12, dtype=int)]  # (12, H, W, 3)
    errors = ErrorMapCache(mae)(examples)
    max_patches = ratio_to_patches(max_ratio, mae.num_patches)
    ratios = (max_ratio, max_ratio / 2)
    title = (
        f"{args.env_id}: how many patches are salient in {len(counts):,} frames of random play?\n"
        "The maximal ratio is the largest share of a frame that the agent may see.\n"
        "mr* is the smallest one, in steps of 5 %, at which more than\n"
        f"{100 * args.coverage:g} % of the frames lose no salient patch (95 % if there is none)."
    )
    figures = {
        "mae_reconstruction": draw_reconstruction(mae, examples[1::3]),
        "salient_selection": draw_selection(mae, examples[2::4], errors[2::4], ratios, args.lorenz_slope),
        "salient_patches": draw_salient_patches(mae, examples, errors, max_patches, args.lorenz_slope),
        "max_ratio": draw_max_ratio(counts, mae.num_patches, ideal, max_ratio, title),
    }
    for name, figure in figures.items():
        with atomic(run_dir / f"figures/{name}.png") as path:
            figure.savefig(path)

    # The report.
    results = {
        "env_id": args.env_id,
        "method": "mae",
        "seed": args.seed,
        "args": vars(args),
        "frames": num_frames,
        "held_out_losses": held_out_losses,
        "K": {f"{q}%": int(np.percentile(counts, q)) for q in (0, 5, 25, 50, 75, 95, 100)},
        "ideal_max_ratio": ideal,
        "max_ratio": max_ratio,
        "kept_whole": kept_whole,
        "pretraining_seconds": None if args.resume or args.mae_checkpoint else seconds,  # a resume times only its part
        "device": str(device),
        "versions": {package: version(package) for package in ("torch", "gymnasium", "ale-py", "numpy")},
    }
    with atomic(run_dir / "results.json") as path:
        path.write_text(json.dumps(results, indent=2))
    (run_dir / "mae/checkpoint.pt").unlink(missing_ok=True)
    if held_out_losses:
        print(f"the MAE's loss on {HELD_OUT_FRAMES} frames that it was not trained on is {held_out_losses[-1]:.4f}")
    print(f"K of {mae.num_patches} patches, by percentile of the frames: {results['K']}")
    if kept_whole > args.coverage:
        print(f"mr* ({ideal:.0%}) keeps {kept_whole:.2%} of the frames whole; see {run_dir}/figures")
    else:
        print(f"no ratio up to 95 % is enough: pre-train longer, or with a mask spread; see {run_dir}/figures")
