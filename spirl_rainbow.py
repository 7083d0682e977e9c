r"""SPIRL: learn to play an Atari game in 100,000 steps by looking only at its salient patches.

Jiang & Weng, "Unsupervised Salient Patch Selection for Data-Efficient Reinforcement Learning", ECML 2023, whose tables
and figures are named below: a masked auto-encoder (MAE) learns to rebuild frames of a random policy. A patch that it
cannot rebuild from the patches around it is salient. The frozen encoder embeds the salient patches of each frame, a
one-layer Transformer pools them, and Data-Efficient Rainbow picks the action (Fig. 5).

    Pre-training and 100K steps on Frostbite:
        python spirl_rainbow.py
    Another game, with a MAE that is here already:
        python spirl_rainbow.py --env-id ALE/Seaquest-v5 --mae-checkpoint tests/weights/Seaquest.pt
    Watch a trained agent play two games:
        python spirl_rainbow.py --env-id ALE/MsPacman-v5 --mae-checkpoint tests/weights/MsPacman.pt \
            --agent-checkpoint tests/weights/MsPacman_agent.pt --eval-episodes 2 --capture-video
    Go on after a stop:
        python spirl_rainbow.py --resume runs/NAME

Sections: 1 arguments, 2 environment, 3 model and pre-training, 4 selection, 5 replay, 6 agent, 7 evaluation, 8 files
and the command line, 9 main.

Shape letters, with their values at the paper's sizes:
    B     batch (32)
    H, W  height and width of a frame (96)
    N     patches of a frame (144)
    C     values of a patch (192 = 8 x 8 x 3)
    K     patches of a frame that were selected
    L     the same with padding, which is max_patches (50 on Frostbite)
    V     visible patches, which the encoder is given (36 in pre-training, 8 in Eq. (3), L for the agent)
    S     frames stacked (4)
    M     3x3 neighbourhoods of patches
    T     tokens
    D     width of a layer (encoder 64, decoder 128, agent 32)
    h     attention heads of a layer (4, 8, 8)
    d     width of a head, D / h
    n     steps of a return (20)
    A     actions (18; MsPacman 9)
    Z     atoms of a return's distribution (51)
    G     evaluation games (50)
"""

import argparse
import ctypes
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
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # a notebook sets it to a backend that may be missing here; files need none

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from matplotlib.animation import PillowWriter
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
    agent_checkpoint: str | None = None  # an agent.pt to watch, without training, with its own MAE as --mae-checkpoint
    run_name: str = ""  # name of the run's folder in runs/; without one {game}__{script}__{seed}__{time}
    resume: str | None = None  # folder of an unfinished run to go on with; only --device and --threads may change
    device: str = "auto"  # auto (CUDA if there is one, else cpu), cpu, cuda or cuda:N; an error if missing
    threads: int = 1  # CPU threads for PyTorch; more gain little, and lose much where other programs are at work
    checkpoint_frequency: int = 10_000  # steps between checkpoints; 0: only the one before each evaluation
    capture_video: bool = False  # save the reported evaluation's first game (up to 1,000 steps) as videos/policy.gif
    compile: bool = False  # torch.compile the loss: the same up to rounding. For GPUs (Triton); gains little on a CPU


@dataclass
class PretrainingArgs:
    """How the auto-encoder is made, unless --mae-checkpoint names one."""

    mae_frames: int | None = None  # frames of random play; if not given, 5,000 for Frostbite, else 50,000 (Table 6)
    mae_epochs: int = 50  # passes over those frames, the first tenth with learning-rate warm-up (Table 5)
    mae_batch_size: int = 64  # frames per pre-training step (Table 5)
    mae_learning_rate: float = 1e-3  # base learning rate; the one used is this * mae_batch_size / 256 (Table 5)
    mae_weight_decay: float = 0.05  # AdamW's weight decay on everything but biases and LayerNorm (Table 5)
    mae_mask_ratio: float = 0.75  # share of the patches hidden from the encoder in pre-training (Table 5)
    mae_mask_spread: float = 0.0  # ours: each batch's mask ratio varies at random by up to this (0.21: 54 to 96 %)
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

    selection: Literal["dynamic", "fixed"] = "dynamic"  # how many patches, K: by a frame's errors, or the maximum
    # largest share of patches kept; if not given, Table 13's or, for other games, mr*, the smallest of 5 %, 10 %, ...
    # that keeps all salient patches of nearly all frames of random play
    max_ratio: float | None = None
    # dynamic-K keeps the patches whose error is above about this share of the frame's mean: the slope at which it cuts
    # the Lorenz curve. The paper's 45 degrees are a slope of 1; the authors' code in effect cuts at 0.5, as we do
    lorenz_slope: float = 0.5


@dataclass
class AgentArgs:
    """What the agent is made of."""

    padding: Literal["zero", "token", "mask"] = "zero"  # rows past K: zeros, a trainable [pad], or masked (Table 14)
    pooling: Literal["cls", "mean"] = "cls"  # a frame's vector: that of a [cls], or its rows' mean (Table 15)
    agent_dim: int = 32  # width that a patch's embedding is projected to (Table 13)
    agent_heads: int = 8  # attention heads of the agent's single Transformer layer (Table 13)
    frame_stack: int = 4  # last frames that the agent sees together (Table 9)
    hidden_size: int = 256  # hidden units of the value and of the advantage stream (Table 10)
    num_atoms: int = 51  # atoms of the return distribution (Rainbow, Hessel et al. 2018, Table 1)
    v_min: float = -10.0  # smallest return of the distribution (Rainbow, Table 1)
    v_max: float = 10.0  # largest return of the distribution (Rainbow, Table 1)
    noisy_std: float = 0.5  # sigma_0 of the noisy layers (Rainbow, Table 1)


@dataclass
class TrainingArgs:
    """How the agent learns, and how it is evaluated."""

    total_timesteps: int = 100_000  # agent steps, of four game frames each (Table 12: 100K; Table 10: 400K)
    learning_starts: int = 1600  # uniformly random steps before the first update (Table 10)
    train_frequency: int = 1  # steps per update (Table 10: 1 at 100K, so 98,400 updates; 4 at 400K)
    buffer_size: int = 100_000  # frames in the replay (Table 10: 100K or 400K)
    batch_size: int = 32  # transitions per update (Rainbow: 32)
    n_step: int = 20  # steps of a multi-step return (Table 10)
    gamma: float = 0.99  # discount per step (Rainbow: 0.99)
    learning_rate: float = 1e-4  # Adam's learning rate (Table 10)
    adam_eps: float = 1.5e-4  # Adam's epsilon (Rainbow, Table 1)
    max_grad_norm: float = 10.0  # the gradient's norm is clipped to this (data-efficient Rainbow)
    target_update_frequency: int = 2000  # updates between copies into the target network (data-efficient Rainbow)
    priority_exponent: float = 0.5  # alpha: a transition is drawn in proportion to priority**alpha (Rainbow, Table 1)
    priority_weight: float = 0.4  # beta, exponent of the importance weights; grows linearly to 1 (Rainbow, Table 1)
    max_episode_frames: int = 108_000  # game frames after which a game is cut off (Table 9)
    eval_episodes: int = 50  # games of an evaluation, each with a seed of its own (Appendix B.3)
    eval_frequency: int = 0  # steps between evaluations, the best median counts; 0: one at the end, its mean counts
    eval_epsilon: float = 0.001  # share of random actions in evaluation (the authors' code)


@dataclass
class Args(RunArgs, PretrainingArgs, SelectionArgs, AgentArgs, TrainingArgs):
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
# The same text as in spirl_mae.py: whoever has read it there may go on with `encode_patches`, in section 4.


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
# The same text as in spirl_mae.py, which also has the error map's plain definition, slow and short; new here are
# `encode_patches` and `embed_salient_patches`.


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


@torch.no_grad()
def encode_patches(mae, frames, patch_ids, count):
    """Embeddings (B, L, D) of the first count (B,) of patch_ids (B, L) in uint8 frames (B, H, W, 3); zeros elsewhere.
    The encoder sees only [cls] and these. Then [cls] is dropped, and the positions are added again: they are the
    agent's positional embedding (Table 13)."""
    present = torch.arange(patch_ids.shape[1], device=frames.device) < count[:, None]  # (B, L)
    patches = mae.patchify(frames).take_along_dim(patch_ids[..., None], 1)  # (B, L, C)
    latent = mae.encode(patches, patch_ids, present)[:, 1:]
    embeddings = latent + mae.pos_embed[0, 1:][patch_ids]
    return embeddings * present[..., None]


def embed_salient_patches(mae, error_map, max_patches, lorenz_slope, frames):
    """What the agent sees of a NumPy array of uint8 frames (B, H, W, 3): embeddings (B, max_patches, D) in float16 and
    counts (B,), on the MAE's device. Errors and selection are on the CPU, where the dict of known errors is."""
    frames = torch.from_numpy(frames)
    patch_ids, count = select_salient_patches(error_map(frames), max_patches, lorenz_slope)
    device = mae.pos_embed.device
    count = count.to(device)
    return encode_patches(mae, frames.to(device), patch_ids.to(device), count).half(), count


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


# ------------------------------------------------------------------------------------------------------------ 5. Replay
class Replay:
    """Prioritised n-step replay (Schaul et al. 2016) of single frames in a ring, on `device`. A frame is what the agent
    keeps of one screen: pixels, or embeddings of its patches.

    Each step: `append` the new frame, act, and `complete` it with the outcome; after a truncation `append` the game's
    last frame and `release_all`. A stack is blank (count 0) before the first frame of its life. A slot can be drawn
    while its priority is above 0: from when its n-step return is known until its stack loses its oldest frame.
    """

    def __init__(self, capacity, frame_shape, dtype, device, frame_stack=4, n_step=20, gamma=0.99, alpha=0.5):
        self.capacity = capacity
        self.n_step = n_step
        self.gamma = gamma
        self.alpha = alpha
        with torch.device(device):
            self.frames = torch.zeros(capacity, *frame_shape, dtype=dtype)
            self.counts = torch.zeros(capacity, dtype=torch.int64)  # patches before padding; 1 for a frame stored whole
            self.actions = torch.full((capacity,), -1)  # -1: no action has been taken on this frame
            self.rewards = torch.zeros(capacity)
            self.ended = torch.zeros(capacity, dtype=torch.bool)  # a life or the game ended there
            self.life_ids = torch.full((capacity,), -1)  # number of a frame's life, from 0; -1: no frame yet
            self.priorities = torch.zeros(capacity, dtype=torch.float64)  # p**alpha; 0: not to be drawn
            self.max_priority = torch.ones((), dtype=torch.float64)  # the largest p**alpha so far
            self.stack_offsets = torch.arange(1 - frame_stack, 1)  # -3, -2, -1, 0
            self.step_offsets = torch.arange(n_step)  # 0, 1, ..., n-1
        self.slot = -1  # slot of the newest frame; -1: none yet
        self.life = -1  # number of the current life
        self.pending = []  # slots whose n-step return is not known yet, the oldest first

    def append(self, frame, count, starts):
        """Store a frame, (*frame_shape) or (1, *frame_shape), and its `count`: of patches, or 1 if it is stored
        whole. `starts`, a Python bool: it is the first of a life."""
        if starts:
            self.life += 1
        slot = self.slot = (self.slot + 1) % self.capacity

        # The new frame overwrites the ring's oldest, which is in the windows of the next three slots. A slot of the old
        # frame's life now misses it; one of the new frame's life, which has then gone once around the ring, would show
        # the new frame as an earlier one. Neither may be drawn any more.
        following = (slot - self.stack_offsets[:-1]) % self.capacity  # slot + 3, + 2, + 1 at S = 4
        misses_old = self.life_ids[following] == self.life_ids[slot]
        takes_new = self.life_ids[following] == self.life
        self.priorities[following] *= ~(misses_old | takes_new)

        self.frames[slot] = frame
        self.counts[slot] = count
        self.life_ids[slot] = self.life
        self.actions[slot] = -1
        self.priorities[slot] = 0.0
        if len(self.pending) == self.n_step:  # the oldest has had its n steps and bootstraps from this frame
            self.release_oldest()

    def complete(self, action, reward, ended):
        """Add the newest frame's action, its clipped reward, and whether a life or the game ended."""
        self.actions[self.slot] = action
        self.rewards[self.slot] = reward
        self.ended[self.slot] = ended
        self.pending.append(self.slot)
        if ended:
            self.release_all()

    def release_all(self):
        """No step of this life will follow: the returns of all pending slots are known."""
        while self.pending:
            self.release_oldest()

    def release_oldest(self):
        """The return of the oldest pending slot is known: let it be drawn, with the largest priority so far."""
        self.priorities[self.pending.pop(0)] = self.max_priority

    def stacks(self, slots):
        """The observations that end in slots (B,): frames (B, S, *frame_shape), oldest first, and counts (B, S). Where
        a count is 0 there is no frame, or one of another life: the network takes it as blank."""
        window = (slots[:, None] + self.stack_offsets) % self.capacity  # (B, S)
        same_life = self.life_ids[window] == self.life_ids[slots][:, None]
        return self.frames[window], self.counts[window] * same_life

    def sample(self, batch_size, beta, generator):
        """Slots (B,), drawn in proportion to p**alpha (stratified: one from each of B equal shares of the total), and
        their importance weights (B,): (1 / probability)**beta over the batch's largest. These are nan while no slot
        can be drawn: store n steps, or one life to its end, first."""
        mass = self.priorities.cumsum(0)  # float64, or 400K additions would lose the small ones
        uniform = torch.rand(batch_size, dtype=torch.float64, device=mass.device, generator=generator)
        points = (uniform + torch.arange(batch_size, device=mass.device)) / batch_size * mass[-1]
        # For each point, the first slot whose running sum exceeds it. By rounding that can be one past the last, hence
        # the clamp, or one with priority 0: its weight is 0.
        slots = torch.searchsorted(mass, points, right=True).clamp(max=self.capacity - 1)
        # A probability is p_alpha / mass[-1]; mass[-1] cancels when the weights are divided by the largest.
        p_alpha = self.priorities[slots]
        weights = torch.where(p_alpha > 0, p_alpha**-beta, 0.0)
        return slots, (weights / weights.max()).float()

    def returns(self, slots):
        """For slots (B,): actions, returns, discounts, and slots of the states to bootstrap from. With m = min(n, steps
        to the end or truncation): sum_{k<m} gamma**k r_{t+k}, and gamma**m for slot t + m, or 0 after an end."""
        window = (slots[:, None] + self.step_offsets) % self.capacity  # (B, n)
        ended = self.ended[window]  # (B, n)
        ends_before = ended.cumsum(1) - ended.long()  # (B, n)
        acted = self.actions[window] >= 0  # False for the newest frame, and for a truncated game's last
        taken = (ends_before == 0) & acted.cumprod(1).bool()  # (B, n): True for k < m
        steps = taken.sum(1)  # m
        returns = (self.rewards[window] * taken * self.gamma**self.step_offsets).sum(1)
        bootstraps = ~(ended & taken).any(1)
        discounts = self.gamma**steps * bootstraps
        return self.actions[slots], returns, discounts, (slots + steps) % self.capacity

    def set_priorities(self, slots, p):
        """New priorities max(p, 1e-6), (B,), of slots (B,); a slot that cannot be drawn stays so."""
        drawable = self.priorities[slots] > 0
        p_alpha = p.double().clamp(min=1e-6) ** self.alpha * drawable
        self.priorities[slots] = p_alpha
        self.max_priority = torch.maximum(self.max_priority, p_alpha.max())


# ------------------------------------------------------------------------------------------------------------- 6. Agent
class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise (Fortunato et al. 2018) in training mode, none in eval mode:
    w = mu + sigma * f(e_out) f(e_in)^T and b = mu + sigma * f(e_out), with f(e) = sign(e) sqrt(|e|).
    The noise is 0 until `resample_noise` draws some, which then stays until the next call."""

    def __init__(self, in_features, out_features, sigma0=0.5):
        super().__init__()
        bound = in_features**-0.5
        self.weight_mu = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), sigma0 * bound))
        self.bias_mu = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        # The authors' code divides by sqrt(out_features) here, Fortunato et al. by sqrt(in_features).
        self.bias_sigma = nn.Parameter(torch.full((out_features,), sigma0 * out_features**-0.5))
        self.register_buffer("noise_in", torch.zeros(in_features))
        self.register_buffer("noise_out", torch.zeros(out_features))

    def resample_noise(self, generator=None):
        """Draw f(e_in) and f(e_out) anew; `generator` is on the layer's device."""
        for noise in (self.noise_in, self.noise_out):
            noise.normal_(generator=generator)
            noise.copy_(noise.sign() * noise.abs().sqrt())

    def forward(self, x):
        weight = self.weight_mu
        bias = self.bias_mu
        if self.training:
            # addcmul: weight + sigma * f(e_out) f(e_in)^T
            weight = torch.addcmul(weight, self.weight_sigma, torch.outer(self.noise_out, self.noise_in))
            bias = bias + self.bias_sigma * self.noise_out
        return F.linear(x, weight, bias)


class SalientPatchTransformer(nn.Module):
    """Pools each frame's patches into one vector o_t and concatenates the stack's: (B, S, L, D), (B, S) -> (B, S*dim).

    Table 13: a linear projection, then one Transformer layer without residual connections over a trainable [cls] and
    the patches. o_t is its [cls] row (`pooling="cls"`) or the mean of its patch rows ("mean", Table 15). `padding` says
    what the rows past a frame's count are (Table 14):
      "zero"   zeros, attended to and averaged like patches
      "token"  a trainable [pad], likewise
      "mask"   neither attended to nor averaged (masked before the softmax; the paper zeroes their weights after it)
    """

    def __init__(self, embed_dim=64, dim=32, heads=8, padding="zero", pooling="cls"):
        super().__init__()
        self.padding = padding
        self.pooling = pooling
        if padding == "token":
            self.pad = nn.Parameter(torch.randn(embed_dim) * 0.02)
        self.project = nn.Linear(embed_dim, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.block = Block(dim, heads, residual=False)
        # The authors' code calls `initialize` here; we keep PyTorch's initial weights, since eight of nine runs scored
        # more than the mean of those with Xavier's on their game. We had tried them because with zero biases a row of
        # zeros enters LayerNorm as exact zeros, where its slope is 1 / sqrt(1e-6) = 1000, and clipping then shrinks all
        # other gradients.

    def tokens(self, embeddings, counts):
        """What the layer reads of each frame, [cls] and the L patches (B*S, 1+L, dim), and which patches are not
        padding (B, S, L)."""
        present = torch.arange(embeddings.shape[2], device=counts.device) < counts[..., None]  # (B, S, L)
        blank = self.pad if self.padding == "token" else 0.0  # for the rows past K, which is 0 for another life's frame
        x = torch.where(present[..., None], embeddings.float(), blank)
        x = self.project(x).flatten(0, 1)  # (B*S, L, dim)
        cls = self.cls_token.expand(len(x), -1, -1)
        return torch.cat([cls, x], 1), present

    def forward(self, embeddings, counts):
        x, present = self.tokens(embeddings, counts)
        attendable = present.flatten(0, 1) if self.padding == "mask" else None
        rows = np.s_[:, :1] if self.pooling == "cls" else np.s_[:, 1:]  # the [cls] row, or the patch rows
        z = self.block(x, attendable, rows).unflatten(0, counts.shape)  # (B, S, 1 or L, dim)
        if self.pooling == "cls":
            o = z.squeeze(2)  # (B, S, dim)
        elif self.padding == "mask":
            o = (z * present[..., None]).sum(2) / counts.clamp(min=1)[..., None]
        else:
            o = z.mean(2)
        return o.flatten(1)


class RainbowNetwork(nn.Module):
    """Dueling, noisy, distributional Q (Hessel et al. 2018) over a trunk: log-probabilities of returns, (B, A, Z). A
    state is whatever the trunk takes: here frames and counts. `support`: smallest and largest return, number of atoms
    Z."""

    def __init__(self, trunk, trunk_dim, num_actions, hidden_size=256, sigma0=0.5, support=(-10, 10, 51)):
        super().__init__()
        num_atoms = support[2]
        self.trunk = trunk
        self.value_hidden = NoisyLinear(trunk_dim, hidden_size, sigma0)
        self.value_out = NoisyLinear(hidden_size, num_atoms, sigma0)
        self.advantage_hidden = NoisyLinear(trunk_dim, hidden_size, sigma0)
        self.advantage_out = NoisyLinear(hidden_size, num_actions * num_atoms, sigma0)
        self.register_buffer("support", torch.linspace(*support))  # z_0 ... z_{Z-1}

    def forward(self, *state):
        o = self.trunk(*state)
        # o - o.detach() is 0 but has o's gradient: the values stay, and the trunk's gradient, the sum of both streams',
        # is divided by sqrt(2) (Wang et al. 2016).
        o = o.detach() + (o - o.detach()) / 2**0.5
        value = self.value_out(F.relu(self.value_hidden(o)))[:, None]  # (B, 1, Z)
        advantage = self.advantage_out(F.relu(self.advantage_hidden(o)))
        advantage = advantage.unflatten(1, (-1, len(self.support)))  # (B, A, Z)
        return (value + advantage - advantage.mean(1, keepdim=True)).log_softmax(2)

    def q_values(self, *state):
        """Expected returns (B, A)."""
        return (self(*state).exp() * self.support).sum(2)

    def resample_noise(self, generator=None):
        """Draw the noise of every noisy layer anew."""
        for layer in self.modules():
            if isinstance(layer, NoisyLinear):
                layer.resample_noise(generator)


def project_distribution(probabilities, returns, discounts, support):
    """The projected Bellman update (Bellemare et al. 2017, Eq. 7): the distribution (B, Z) of returns + discounts * X,
    put back on the support, where X has probabilities (B, Z) on the evenly spaced support (Z,); returns and discounts
    are (B,). Each shifted atom shares its mass between its two neighbours by closeness: a triangular kernel."""
    spacing = support[1] - support[0]
    shifted = returns[:, None] + discounts[:, None] * support  # (B, Z)
    shifted = shifted.clamp(support[0], support[-1])
    distance = (shifted[:, None] - support[:, None]).abs() / spacing  # (B, Z, Z), from atom i to shifted atom j
    kernel = (1 - distance).clamp(min=0)  # what atom i gets of shifted atom j
    return (kernel @ probabilities[:, :, None]).squeeze(2)


def c51_loss(online, target, states, actions, returns, discounts, next_states, importance_weights):
    """The weighted loss of B transitions, KL(target distribution || prediction) of each (B,), and the mean Q of the
    actions taken. States are tuples that the networks take; actions, returns, discounts and weights are (B,)."""
    batch = torch.arange(len(actions), device=actions.device)
    with torch.no_grad():
        best = online.q_values(*next_states).argmax(1)  # double Q-learning: the online network chooses,
        probabilities = target(*next_states)[batch, best].exp()  # the target network values it; (B, Z)
        target_probs = project_distribution(probabilities, returns, discounts, online.support)
    log_probs = online(*states)[batch, actions]  # (B, Z)
    kl = F.kl_div(log_probs, target_probs, reduction="none").sum(1)
    loss = (importance_weights * kl).mean()
    q = (log_probs.detach().exp() * online.support).sum(1).mean()
    return loss, kl.detach(), q


def learn(args, online, target, optimizer, replay, beta, generator):
    """One update of the online network; returns a dict of 0-dimensional tensors: loss, q_values (mean Q of the
    actions taken), grad_norm. A gradient that is not finite goes unnoticed here, as a check would wait for the GPU. It
    turns the weights nan, and with them all later gradients, which main checks before it saves."""
    slots, importance_weights = replay.sample(args.batch_size, beta, generator)
    actions, returns, discounts, next_slots = replay.returns(slots)
    states = replay.stacks(slots)
    next_states = replay.stacks(next_slots)
    online.resample_noise(generator)
    target.resample_noise(generator)
    loss, kl, q = c51_loss(online, target, states, actions, returns, discounts, next_states, importance_weights)
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(online.parameters(), args.max_grad_norm)
    optimizer.step()
    replay.set_priorities(slots, kl)
    return {"loss": loss.detach(), "q_values": q, "grad_norm": grad_norm}


# -------------------------------------------------------------------------------------------------------- 7. Evaluation
@torch.no_grad()
def evaluate(args, network, preprocess):
    """Play args.eval_episodes whole games, side by side and without noise: (raw scores, recording).

    `preprocess(frames)` turns a NumPy array of B uint8 frames into what the stacks hold: features (B, *), counts (B,).
    The games' starts are the same each time. As in the authors' code, a lost life does not blank the stack, unlike in
    training. Recording: (frame, state) of each of the first game's first 1,000 steps, for the figures.
    """
    G = args.eval_episodes
    envs = make_envs(args, G)
    rng = np.random.default_rng([args.seed, EVALUATE])
    network.eval()
    observation, _ = envs.reset(seed=game_seeds(args.seed, EVALUATE, num=G))
    scores = np.zeros(G)
    actions = np.zeros(G, int)
    playing = np.arange(G)  # the games that are not over
    recording = []
    stacks = None
    progress = tqdm(desc="evaluating")
    while len(playing):
        features, count = preprocess(observation[playing, 0])
        if stacks is None:  # the first step: begin with blank frames, count 0
            stacks = features.new_zeros(G, args.frame_stack, *features.shape[1:])  # (G, S, *)
            counts = count.new_zeros(G, args.frame_stack)
        stacks = stacks.roll(-1, 1)  # the newest frame comes last, where the oldest was
        counts = counts.roll(-1, 1)
        stacks[playing, -1] = features
        counts[playing, -1] = count
        if playing[0] == 0 and len(recording) < 1000:  # the first game is not over
            state = stacks[:1].clone(), counts[:1].clone()
            recording.append((observation[0, 0].copy(), state))

        q = network.q_values(stacks[playing], counts[playing])  # (games that are not over, A)
        greedy = q.argmax(1).cpu().numpy()
        random_actions = rng.integers(envs.single_action_space.n, size=len(playing))
        is_random = rng.random(len(playing)) < args.eval_epsilon
        actions[playing] = np.where(is_random, random_actions, greedy)
        observation, reward, terminated, truncated, _ = envs.step(actions)  # games that are over restart, uncounted
        scores[playing] += reward[playing]
        playing = playing[~(terminated | truncated)[playing]]
        progress.update()
        progress.set_postfix(still_playing=len(playing))
    progress.close()
    envs.close()
    network.train()
    return scores.tolist(), recording


@torch.no_grad()
def attended_patches(trunk, state, patch_ids):
    """Fig. 6 for the newest frame of a state (batch 1) with patch_ids (1, L) on the CPU: the ids of the
    selected patches, and of the attended ones: the fewest that together get at least 60 % of the attention that [cls]
    (in mean pooling, the patch rows) pays to the selected patches, averaged over heads."""
    embeddings, counts = state
    x, _ = trunk.tokens(embeddings, counts)
    q, k, _ = trunk.block.queries_keys_values(x)
    q, k = q[-1], k[-1]  # of the newest frame, (1+L, h, d)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5  # (h, 1+L, 1+L)
    num_selected = counts[0, -1]  # K
    selected = patch_ids[0, :num_selected]
    if trunk.padding == "mask":  # padding is not attended to, and its own rows are not averaged
        scores = scores[:, : 1 + num_selected, : 1 + num_selected]
    weights = scores.softmax(2).mean(0)  # (1+L, 1+L), or (1+K, 1+K)
    weights = weights[:1] if trunk.pooling == "cls" else weights[1:]  # of the rows that o_t is made of
    attention = weights.mean(0)[1 : 1 + num_selected].cpu()  # (K,)
    attention, order = attention.sort(descending=True)
    num_attended = (attention.cumsum(0) < 0.6 * attention.sum()).sum() + 1
    return selected.tolist(), selected[order[:num_attended]].tolist()


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


def draw_policy_attention(marked, side, path):
    """Fig. 6 as a PNG: eight steps of the list `marked` of (frame, ids of selected patches, ids of attended ones)."""
    figure = Figure(figsize=(15, 8.2), layout="constrained")
    steps = np.linspace(0, len(marked) - 1, 8, dtype=int)
    for axis, step in zip(figure.subplots(2, 4).flat, steps):
        frame, selected, attended = marked[step]
        axis.imshow(mark_patches(frame, selected, attended, side))
        axis.set_title(f"step {step}: K = {len(selected)}, {len(attended)} of them yellow")
        axis.axis("off")
    figure.suptitle("Outlined: the patches the agent sees. Yellow: the fewest that get 60 % of its attention to them")
    with atomic(path) as temporary:
        figure.savefig(temporary)


def save_video(marked, side, path):
    """A GIF of the list `marked` of (frame, ids of selected patches, ids of attended ones)."""
    figure = Figure()
    image = figure.figimage(mark_patches(*marked[0], side), resize=True)  # the figure is the picture, pixel by pixel
    writer = PillowWriter(fps=15)
    with atomic(path) as temporary, writer.saving(figure, temporary, figure.dpi):
        for step in tqdm(marked, f"drawing {path.name}"):
            image.set_data(mark_patches(*step, side))
            writer.grab_frame()


# ---------------------------------------------------------------------------------------- 8. Files and the command line
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


def load_agent(path, args):
    """The dict in agent.pt: `model`, `step`, `max_patches`, `args`. Exits with status 2 unless the game, the
    MAE's sizes, the selection and the agent are those that `args` ask for."""
    content = read_checkpoint(path)
    if "max_patches" not in content:
        fail(f"{path} is not an agent.pt of this script; give another file")
    flags = vars(Args()) | content["args"]  # a flag newer than the agent had its default
    for name in ("env_id", *mae_sizes(args), *vars(SelectionArgs()), *vars(AgentArgs())):
        if flags[name] != getattr(args, name):
            fail(f"{path} was trained with --{name.replace('_', '-')} {flags[name]}; give it too (None: leave it out)")
    return content


def keep_freed_memory():
    """Let glibc keep up to 1 GiB of freed memory for the next step; asking the system each time is slow."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, 32 MiB: only larger pieces are kept out of the heap
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: the heap may keep this many free bytes


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
    for name, default in vars(PretrainingArgs()).items():
        if args.mae_checkpoint is not None and name.startswith("mae_") and getattr(args, name) != default:
            fail(f"--{name.replace('_', '-')} is for pre-training: --mae-checkpoint replaces that; give only one")
    num_patches = (args.image_size // args.patch_size) ** 2
    if args.image_size % args.patch_size or num_patches < 9:
        fail(f"--image-size {args.image_size} must be --patch-size {args.patch_size} times a whole number, at least 3")
    for part in ("encoder", "decoder", "agent"):
        dim = getattr(args, f"{part}_dim")
        heads = getattr(args, f"{part}_heads")
        if dim % heads or (part != "agent" and dim % 4):  # sine-cosine positions need it
            fail(f"--{part}-dim {dim} must be a multiple of --{part}-heads {heads}; encoder and decoder also of 4")
    num_frames = args.mae_frames or PAPER_MAE_FRAMES.get(args.env_id, 50_000)
    if num_frames < args.mae_batch_size:
        fail(f"--mae-frames {num_frames} must be at least --mae-batch-size {args.mae_batch_size}")
    spread = args.mae_mask_spread
    highest = 1 - 1 / num_patches - spread  # so that the encoder sees a patch
    if not spread <= args.mae_mask_ratio < highest:
        fail(f"--mae-mask-ratio {args.mae_mask_ratio} must be from --mae-mask-spread ({spread}) to below {highest:.3f}")
    if args.agent_checkpoint is not None and args.mae_checkpoint is None:
        fail("--agent-checkpoint needs --mae-checkpoint: the mae.pt that the agent was trained with")
    if args.max_ratio is not None and ratio_to_patches(args.max_ratio, num_patches) == 0:
        fail(f"--max-ratio {args.max_ratio} must keep at least one of {num_patches} patches")
    # Before the first update the replay needs an n-step return, and at least one update has to follow.
    latest = args.total_timesteps - args.train_frequency
    if not args.n_step < args.learning_starts <= latest:
        fail(f"--learning-starts {args.learning_starts} must be above --n-step ({args.n_step}) and at most {latest}")
    if args.buffer_size < args.batch_size + args.n_step + args.frame_stack:
        fail(f"--buffer-size {args.buffer_size} must be at least --batch-size + --n-step + --frame-stack")
    if args.num_atoms < 2:
        fail(f"--num-atoms {args.num_atoms} must be at least 2")
    if not -math.inf < args.v_min < args.v_max < math.inf:
        fail(f"--v-min {args.v_min} must be below --v-max {args.v_max}, and both finite")


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


# -------------------------------------------------------------------------------------------------------------- 9. Main
if __name__ == "__main__":
    args = parse_args()
    check_args(args)
    device = pick_device(args.device)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    game = gym.spec(args.env_id).name  # without "ALE/" and "-v5"
    run_name = args.run_name or f"{game}__{Path(__file__).stem}__{args.seed}__{int(1000 * time.time())}"
    run_dir = Path(args.resume or f"runs/{run_name}")

    # The auto-encoder is this run's own mae.pt (after a resume), else --mae-checkpoint, else one is pre-trained below.
    # `saved_mae` is what mae.pt will hold. Its tensors are the MAE's own, so pre-training changes them too.
    torch.manual_seed(args.seed)
    mae = MaskedAutoencoder(**mae_sizes(args)).to(device)
    saved_mae = {"model": mae.state_dict(), "sizes": mae_sizes(args), "env_id": args.env_id, "args": vars(args)}
    max_ratio = args.max_ratio or PAPER_MAX_RATIO.get(args.env_id)  # None for other games: mr*, set below
    run_mae_path = run_dir / "mae.pt"
    source_path = run_mae_path if args.resume and run_mae_path.exists() else args.mae_checkpoint
    if source_path is not None:
        saved_mae |= load_mae(source_path, mae, args)  # the file's `args` too: how it was made
        if max_ratio is None and saved_mae.get("salient_counts", {}).get("lorenz_slope") != args.lorenz_slope:
            fail(f"{source_path} has no counts of salient patches at slope {args.lorenz_slope}; give --max-ratio")
    trained = load_agent(args.agent_checkpoint, args) if args.agent_checkpoint is not None else None
    last_saved = "the last checkpoint"  # `stop` reads it
    lock = open_run(args, run_dir)  # the lock lasts while this file is open; nothing is created before this
    print(f"--device {device}, --threads {args.threads}; writing to {run_dir}; if stopped: --resume {run_dir}")
    if source_path is None:
        num_frames = args.mae_frames or PAPER_MAE_FRAMES.get(args.env_id, 50_000)
        frames = collect_random_frames(args, num_frames + HELD_OUT_FRAMES)
        frames, held_out = frames.tensor_split([num_frames])
        pretrain_mae(args, mae, frames, held_out, run_dir / "mae")
        saved_mae["salient_counts"] = count_salient_patches(mae, frames, args.lorenz_slope)
        del frames, held_out  # free memory for training
    save(saved_mae, run_mae_path)
    mae.eval().requires_grad_(False)
    if max_ratio is None:
        max_ratio = ideal_max_ratio(saved_mae["salient_counts"]["counts"], mae.num_patches)
    max_patches = trained["max_patches"] if trained else ratio_to_patches(max_ratio, mae.num_patches)
    print(f"the agent sees at most {max_patches} of {mae.num_patches} patches of a frame")
    lorenz_slope = args.lorenz_slope if args.selection == "dynamic" else None

    # The agent. Seed again: its weights must not depend on how the MAE was made.
    torch.manual_seed(args.seed)
    envs = make_envs(args, 1)
    num_actions = envs.single_action_space.n
    error_map = ErrorMapCache(mae)
    preprocess = partial(embed_salient_patches, mae, error_map, max_patches, lorenz_slope)  # frames -> embeddings, K
    trunk = SalientPatchTransformer(args.encoder_dim, args.agent_dim, args.agent_heads, args.padding, args.pooling)
    trunk_dim = args.frame_stack * args.agent_dim
    frame_shape = (max_patches, args.encoder_dim)
    dtype = torch.float16
    support = (args.v_min, args.v_max, args.num_atoms)
    online = RainbowNetwork(trunk, trunk_dim, num_actions, args.hidden_size, args.noisy_std, support).to(device)
    target = deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    replay = Replay(
        args.buffer_size, frame_shape, dtype, device, args.frame_stack, args.n_step, args.gamma, args.priority_exponent
    )
    # The random actions before learning are drawn now, so that a checkpoint needs no random state for them.
    random_actions = np.random.default_rng([args.seed, ACT]).integers(num_actions, size=args.learning_starts)
    generator = torch.Generator(device).manual_seed(game_seeds(args.seed, LEARN).item())  # noise and sampling
    online.resample_noise(generator)  # to act with until the first update draws anew
    if args.compile:
        c51_loss = torch.compile(c51_loss)  # replaces the global function that `learn` calls

    # The run's progress; `score` and `actions` are of the game being played. The emulator's state is not saved: a
    # resume plays the game again, from its seed and its actions.
    run = SimpleNamespace(saved_step=0, updates=0, training_scores=[], evaluations=[], seconds=0, score=0, actions=[])

    # Go on from the checkpoint, if there is one.
    checkpoint_path = run_dir / "checkpoint.pt"
    if checkpoint_path.exists():
        checkpoint = read_checkpoint(checkpoint_path, device)
        online.load_state_dict(checkpoint["online"])
        target.load_state_dict(checkpoint["target"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        vars(replay).update(checkpoint["replay"])
        error_map.errors = checkpoint["errors"]
        vars(run).update(checkpoint["run"])
        last_saved = f"step {run.saved_step}"
        try:
            generator.set_state(checkpoint["generator"].cpu())
        except RuntimeError:  # a CPU's generator cannot go on from a GPU's state
            generator.manual_seed(game_seeds(args.seed, LEARN, run.saved_step).item())
            print("note: another kind of device than before: from here the digits differ from a run's that never moved")

    # Start the game. A resumed run plays it again up to where it was saved.
    observation, info = envs.reset(seed=game_seeds(args.seed, PLAY, len(run.training_scores)))  # (1, 1, H, W, 3)
    for action in run.actions:
        observation, *_, info = envs.step(np.array([action]))
    if run.saved_step == 0:  # a new run: the replay of a resumed one has this frame
        replay.append(*preprocess(observation[:, 0]), starts=True)
    elif not np.array_equal(observation, checkpoint["observation"].cpu().numpy()):
        fail(f"--resume {run_dir}: the replayed game differs at step {run.saved_step}; resume with the same ale-py")
    writer = SummaryWriter(run_dir, purge_step=run.saved_step)  # drops what was logged after the checkpoint

    # Train up to the next evaluation, and evaluate. In the 100K setting there is one, at the end.
    start_time = time.perf_counter() - run.seconds
    eval_frequency = args.eval_frequency or args.total_timesteps
    eval_steps = [*range(eval_frequency, args.total_timesteps, eval_frequency), args.total_timesteps]
    if trained:  # all its steps are done: what is left is to evaluate
        online.load_state_dict(trained["model"])
        run.saved_step = trained["step"]
        eval_steps = [run.saved_step]
    for eval_step in eval_steps[len(run.evaluations) :]:  # after a resume, those that are not done
        steps = range(run.saved_step, eval_step)  # none, and no bar, where only the evaluation is left
        progress = tqdm(steps, "training", args.total_timesteps, initial=run.saved_step, disable=not steps)
        for step in progress:
            # Act.
            if step < args.learning_starts:
                action = int(random_actions[step])
            else:
                with torch.no_grad():  # greedy: the noise explores
                    state = replay.stacks(torch.tensor([replay.slot], device=device))
                    action = int(online.q_values(*state).argmax())

            # Step.
            lives = info["lives"][0]
            observation, reward, terminated, truncated, info = envs.step(np.array([action]))
            life_ended = bool(terminated[0] or info["lives"][0] < lives)  # Table 9: a lost life is terminal
            game_ended = bool(terminated[0] or truncated[0])
            run.score += float(reward[0])
            run.actions.append(action)

            # Store, and begin the next game where one has ended.
            replay.complete(action, float(np.clip(reward[0], -1, 1)), life_ended)  # Table 9: clipped rewards
            if game_ended and not life_ended:  # cut off: store its last frame, for its returns to bootstrap from
                replay.append(*preprocess(observation[:, 0]), starts=False)
                replay.release_all()
            if game_ended:
                writer.add_scalar("charts/episodic_return", run.score, step)
                run.training_scores.append((step, run.score))
                progress.set_postfix(score=run.score)
                run.score = 0.0
                run.actions = []
                # Reset with the game's own seed: the automatic reset would choose one, and take a step.
                observation, info = envs.reset(seed=game_seeds(args.seed, PLAY, len(run.training_scores)))
            replay.append(*preprocess(observation[:, 0]), starts=life_ended or game_ended)

            # Learn.
            if step >= args.learning_starts and step % args.train_frequency == 0:
                fraction = (step - args.learning_starts) / (args.total_timesteps - args.learning_starts)
                beta = args.priority_weight + (1 - args.priority_weight) * fraction
                metrics = learn(args, online, target, optimizer, replay, beta, generator)
                run.updates += 1
                if run.updates % args.target_update_frequency == 0:
                    target.load_state_dict(online.state_dict())
                if run.updates % 100 == 0:
                    for key, value in metrics.items():
                        writer.add_scalar(f"losses/{key}", value, step)

            # Log.
            done = step + 1  # steps taken, this one included
            if done % 100 == 0:
                writer.add_scalar("charts/SPS", done / (time.perf_counter() - start_time), step)
                writer.add_scalar("charts/K", replay.counts[replay.slot], step)

            # Save. All of this step is done, so a run resumed here begins with the next one.
            due = args.checkpoint_frequency and done % args.checkpoint_frequency == 0
            if due or done == eval_step:
                # Clips nothing, but raises RuntimeError where a gradient is not finite: the last good checkpoint stays.
                nn.utils.clip_grad_norm_(online.parameters(), math.inf, error_if_nonfinite=True)
                writer.flush()
                run.seconds = time.perf_counter() - start_time
                run.saved_step = done
                checkpoint = {
                    "online": online.state_dict(),
                    "target": target.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "replay": vars(replay),
                    "errors": error_map.errors,
                    "run": vars(run),
                    "generator": generator.get_state(),
                    "observation": torch.from_numpy(observation),
                }
                save(checkpoint, checkpoint_path)
                last_saved = f"step {done}"  # only now is it on disk

        # Evaluate. Training gets its cache of errors back afterwards: an error's last digits depend on which others are
        # computed with it, so if evaluation filled that cache, evaluating more often would change training.
        training_errors = error_map.errors.copy()
        scores, recording = evaluate(args, online, preprocess)
        median = float(np.median(scores))
        writer.add_scalar("eval/mean", np.mean(scores), eval_step)
        writer.add_scalar("eval/median", median, eval_step)
        run.evaluations.append({"step": eval_step, "scores": scores, "median": median})
        best = max(run.evaluations, key=lambda evaluation: evaluation["median"])  # the first of equals
        if best["step"] == eval_step:  # the best so far
            agent = {"model": online.state_dict(), "args": vars(args), "step": eval_step, "max_patches": max_patches}
            save(trained or agent, run_dir / "agent.pt")  # a watched agent is copied as it is
            marked = []
            for frame, state in recording:
                errors = error_map(torch.from_numpy(frame[None]))  # again, from the cache: a state has no patch ids
                patch_ids, _ = select_salient_patches(errors, max_patches, lorenz_slope)
                marked.append((frame, *attended_patches(trunk, state, patch_ids)))
            draw_policy_attention(marked, mae.side, run_dir / "figures/policy_attention.png")
            if args.capture_video:
                save_video(marked, mae.side, run_dir / "videos/policy.gif")
        error_map.errors = training_errors

    # The report.
    envs.close()
    writer.close()
    scores = best["scores"]
    measure = "best median of the evaluations" if args.eval_frequency else "mean score of the final weights"
    if trained:
        measure = f"mean score of a trained agent, after step {run.saved_step}"
    results = {
        "env_id": args.env_id,
        "method": "spirl",
        "seed": args.seed,
        "args": vars(args),
        "protocol": f"{measure}: {len(scores)} whole games, epsilon {args.eval_epsilon}, no noise, raw scores",
        "mean": np.mean(scores),
        "median": best["median"],
        "std": np.std(scores, ddof=1) if len(scores) > 1 else None,
        "scores": scores,
        "evaluations": run.evaluations,
        "training_scores": run.training_scores,
        "steps": run.saved_step,
        "updates": run.updates,
        "max_patches": max_patches,
        "training_seconds": time.perf_counter() - start_time,  # evaluations included
        "device": str(device),
        "versions": {package: version(package) for package in ("torch", "gymnasium", "ale-py", "numpy")},
    }
    with atomic(run_dir / "results.json") as path:
        path.write_text(json.dumps(results, indent=2))
    for path in (checkpoint_path, run_dir / "mae/checkpoint.pt"):
        path.unlink(missing_ok=True)
    print(f"mean {results['mean']:.1f}, median {best['median']:.1f} ({measure}); see {run_dir}/results.json")
