"""SPIRL's first half: learn without reward which patches of an Atari game are salient, and show it.

Jiang & Weng, "Unsupervised Salient Patch Selection for Data-Efficient Reinforcement Learning", ECML 2023.

A masked auto-encoder (MAE) learns to rebuild frames of a random policy from a quarter of their patches (Fig. 1). A
patch that it cannot rebuild from the patches around it is salient, and a frame's Lorenz curve of these errors says how
many are (Fig. 3). There is no reinforcement learning here: `spirl_rainbow.py` takes the `mae.pt` that this saves.

    python spirl_mae.py                                                      # the paper's pre-training on Frostbite
    python spirl_mae.py --env-id ALE/Seaquest-v5 --device cuda               # another game, 50,000 frames
    python spirl_mae.py --mae-checkpoint runs/NAME/mae.pt --mae-frames 2000  # only look at what one has learned

Contents, in reading order:
    1. Arguments      Args, parse_args, check_common_args, check_args, resumed_args, pick_device, check_memory
    2. Environment    make_envs, game_seeds
    3. Model          MaskedAutoencoder, collect_random_frames, pretrain_mae
    4. Selection      reconstruction_error_map, ErrorMapCache, select_salient_patches, ideal_max_ratio,
                      count_salient_patches
    5. Figures        decoder_pictures, paint, draw_...
    6. Files          sync, write_whole, read_checkpoint, Curves, save_checkpoint, new_run, lock_run, load_checkpoint,
                      Signals, save_mae, load_mae
    7. Main           keep_freed_memory

The paper is in sections 3 and 4; 1 and 6 only keep a run safe, and can be skipped at first.

Shape letters: B batch, P patches a side, N = P**2, p pixels a patch's side, D width of a layer, T tokens, H attention
heads, d = D / H, K patches that the encoder sees or that are selected, M neighbourhoods. (In code F is
torch.nn.functional; in frames' shapes H and W are pixels.)
"""

import argparse
import contextlib
import ctypes
import difflib
import fcntl
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections import defaultdict
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import ale_py
import gymnasium as gym
import matplotlib
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

matplotlib.use("Agg")  # figures go to files: no screen is needed
import matplotlib.pyplot as plt

gym.register_envs(ale_py)


# --------------------------------------------------------------------------------------------------------- 1. Arguments


@dataclass
class Args:
    """The command line: each field is a flag, and its docstring the flag's help."""

    env_id: str = "ALE/Frostbite-v5"
    """the Atari game; the paper plays Frostbite, MsPacman, Seaquest and BattleZone"""
    seed: int = 1
    """seed of every random stream: weights, masks, collection, training, noise, evaluation"""
    device: str = "auto"
    """auto (CUDA where it is, else cpu), cpu, cuda or cuda:N; a named device that is absent is an error"""
    threads: int = 0
    """CPU threads that PyTorch uses (0: its own choice); give 1 where several runs share the machine"""
    run_name: str = ""
    """name of the run's folder in runs/ (default: {game}__{script}__{seed}__{time})"""
    checkpoint_frequency: int = 10_000
    """training steps between two checkpoints (ours); pre-training has one every epoch; 0: only where a signal stops the
    run, after pre-training and before an evaluation"""
    resume: Path | None = None
    """folder of an unfinished run to go on with; the run's own arguments hold, so no other flag may stand beside it"""

    # The masked auto-encoder and its pre-training
    mae_checkpoint: Path | None = None
    """a mae.pt of the same game and sizes, in place of pre-training one"""
    mae_frames: int | None = None
    """frames of random play (the default is Table 6's: 5,000 for Frostbite, 50,000 for any other game)"""
    mae_epochs: int = 50
    """passes over those frames (Table 5); a tenth of them warms the learning rate up (Table 5: 5 of 50)"""
    mae_batch_size: int = 64
    """frames a pre-training step (Table 5)"""
    mae_learning_rate: float = 1e-3
    """base learning rate; the one used is this * mae_batch_size / 256 (Table 5)"""
    mae_weight_decay: float = 0.05
    """AdamW's weight decay on everything but biases and LayerNorm (Table 5)"""
    mae_mask_ratio: float = 0.75
    """share of the patches hidden from the encoder in pre-training (Table 5)"""
    image_size: int = 96
    """side of the square RGB frames, in pixels (Table 4)"""
    patch_size: int = 8
    """side of a patch, in pixels (Table 4)"""
    encoder_dim: int = 64
    """width of the encoder and of a patch's embedding (Table 4)"""
    encoder_depth: int = 3
    """Transformer layers of the encoder (Table 4)"""
    encoder_heads: int = 4
    """attention heads of the encoder (Table 4)"""
    decoder_dim: int = 128
    """width of the decoder (Table 4)"""
    decoder_depth: int = 3
    """Transformer layers of the decoder (Table 4)"""
    decoder_heads: int = 8
    """attention heads of the decoder (Table 4)"""
    max_episode_frames: int = 108_000
    """game frames after which a game is cut off; its last state still has a value (Table 9)"""

    # Salient patch selection
    max_ratio: float | None = None
    """most patches kept, as a share of all (Table 13: Frostbite 0.35, MsPacman 0.30, Seaquest 0.20, BattleZone 0.30;
    the default, and mr* of the pre-training frames for any other game)"""
    lorenz_slope: float = 0.5
    """slope of the Lorenz curve where dynamic-K cuts it. The paper's 45 degrees would be 1. The authors' code divides
    the curve's rise over two patches by one patch's step, which makes it 0.5. With our MAEs 0.5 keeps more patches than
    the paper, and 1 comes nearer to it: see the README"""
    coverage: float = 0.999
    """share of the frames of which mr* keeps every salient patch (Appendix B.5: more than 99.9 %)"""
    error_cache_size: int = 2**22
    """patch errors remembered (ours: 55 MB; a 100K run meets some millions); when full, the oldest are replaced"""


def fail(message):
    """Print one line about a bad argument to stderr and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_args():
    """The command line as Args, or those of the run that --resume names. tyro's boxes of errors become one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            args = tyro.cli(Args, description=__doc__.split("\n\n")[0])
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        text = " ".join(line.strip("│|+ ") for line in box.getvalue().splitlines()[1:-1])  # within the frame
        fail("; ".join(part.strip() for part in re.split("[─-]{5,}", text) if part.strip()))  # rules part it
    return resumed_args(args)


def check_common_args(args):
    """Stop with one clear line if an argument that the scripts share cannot work."""
    counts = ("seed", "checkpoint_frequency", "mae_frames", "mae_epochs", "error_cache_size", "total_timesteps",
              "learning_starts", "train_frequency", "buffer_size", "target_update_frequency", "max_episode_frames",
              "eval_frequency")  # of steps, frames, entries; other integers are sizes
    for name, value in vars(args).items():  # what holds for a field holds for all fields of its kind
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            fail(f"{flag} is {value}; give a finite number")
        may_be_zero = name in ("seed", "threads", "checkpoint_frequency", "learning_starts", "eval_frequency",
                               "eval_epsilon", "gamma", "mae_weight_decay", "noisy_std", "priority_exponent",
                               "priority_weight")
        if name not in ("v_min", "v_max") and (value < 0 or value == 0 and not may_be_zero):
            fail(f"{flag} is {value}; give a number {'of at least' if may_be_zero else 'above'} 0")
        bits = 31 if name in counts or isinstance(value, float) else 12
        if abs(value) >= 2**bits:
            fail(f"{flag} is {value}; give a number below 2**{bits}")
        shares = ("gamma", "mae_mask_ratio", "max_ratio", "coverage", "priority_exponent", "priority_weight",
                  "eval_epsilon")  # not each script has each of them
        if name in shares and value > 1:
            fail(f"{flag} is {value}; give a share of at most 1")
        if name == "coverage" and value == 1:
            fail(f"{flag} is {value}; give a share below 1, for mr* keeps more than that share of the frames whole")
    if args.threads > os.cpu_count() and args.resume is None:
        fail(f"--threads is {args.threads}; give at most the machine's {os.cpu_count()} CPUs")
    games = {name.lower(): name for name, spec in gym.registry.items()
             if name.startswith("ALE/") and spec.entry_point == "ale_py.env:AtariEnv"}
    if args.env_id not in games.values():
        wanted = args.env_id.lower() if args.env_id.lower().startswith("ale/") else f"ale/{args.env_id.lower()}"
        close = [games[name] for name in difflib.get_close_matches(wanted, games, n=3, cutoff=0.0)]
        fail(f"--env-id {args.env_id} is not an Atari game of ale-py; the closest names are {', '.join(close)}")
    if args.image_size % args.patch_size:
        fail(f"--image-size {args.image_size} is not a multiple of --patch-size {args.patch_size}")
    if args.image_size < 3 * args.patch_size:
        fail(f"--image-size {args.image_size} holds fewer than 3x3 patches; give at least {3 * args.patch_size}")
    for part in ("encoder", "decoder"):
        width, heads = getattr(args, f"{part}_dim"), getattr(args, f"{part}_heads")
        if width % heads:
            fail(f"--{part}-dim {width} is not a multiple of --{part}-heads {heads}")
        if width % 4:
            fail(f"--{part}-dim {width} is not a multiple of 4 (sine and cosine of two axes)")
    num_patches = (args.image_size // args.patch_size) ** 2
    if num_patches > 64**2:
        fail(f"--image-size {args.image_size} holds {num_patches} patches; give at most {64 * args.patch_size}")
    if int(num_patches * (1 - args.mae_mask_ratio)) < 1:
        fail(f"--mae-mask-ratio {args.mae_mask_ratio} leaves no patch to see; give at most "
             f"{math.floor(1e4 - 1e4 / num_patches) / 1e4}")
    of_pretraining = ("mae_epochs", "mae_batch_size", "mae_learning_rate", "mae_weight_decay", "mae_mask_ratio")
    for field in fields(args):
        if args.mae_checkpoint and field.name in of_pretraining and getattr(args, field.name) != field.default:
            fail(f"--{field.name.replace('_', '-')} is for pre-training, which --mae-checkpoint replaces; leave one of "
                 "them out")
    if args.resume is not None:
        return  # what follows was new, and there, when the run began
    if args.mae_checkpoint is not None and not os.path.isfile(args.mae_checkpoint):
        fail(f"--mae-checkpoint {args.mae_checkpoint} is not a file; give a mae.pt, or leave the flag out to pre-train")
    usable = Path(args.run_name).name == args.run_name != ".." and len(os.fsencode(args.run_name)) < 200
    if args.run_name and (not usable or (Path("runs") / args.run_name).exists()):
        fail(f"--run-name {args.run_name} is not the name of a new folder in runs/; give another name")


def check_args(args):
    """Stop with one clear line if an argument cannot work. Nothing has been created when this runs."""
    check_common_args(args)
    if args.mae_frames is not None and args.mae_frames < args.mae_batch_size and args.mae_checkpoint is None:
        fail(f"--mae-frames {args.mae_frames} is not one batch; give at least --mae-batch-size {args.mae_batch_size}")
    num_patches = (args.image_size // args.patch_size) ** 2
    if args.max_ratio is not None and ratio_to_patches(args.max_ratio, num_patches) < 1:
        fail(f"--max-ratio {args.max_ratio} keeps no patch of {num_patches}; give at least "
             f"{math.ceil(1e4 / num_patches) / 1e4}")


def resumed_args(args):
    """The arguments of the run that --resume names, or, without that flag, `args` themselves."""
    if args.resume is None:
        if any(word.split("=")[0] == "--resume" for word in sys.argv[1:]):
            fail("--resume None is not the folder of a run; give one, runs/NAME")
        return args
    words = [word.removeprefix("--resume=") for word in sys.argv[1:] if word != "--resume"]
    others = [word for word in words if Path(word) != args.resume]
    if others:
        fail(f"--resume stands alone, for the run's own arguments hold; leave {' '.join(others)} out")
    if not os.path.isfile(args.resume / "args.json"):
        fail(f"--resume {args.resume} is not the folder of a run; give one, runs/NAME")
    try:
        stored = json.loads((args.resume / "args.json").read_text())
    except (OSError, ValueError) as error:
        fail(f"--resume {args.resume}: its args.json is damaged ({error}); start a new run")
    if not isinstance(stored, dict) or stored.keys() != plain_args(args).keys():
        fail(f"--resume {args.resume} is a run of another script or version; use what started it")
    for field in fields(args):
        kinds = [str if kind is Path else kind for kind in get_args(field.type) or [field.type]]  # or choices
        value = stored.get(field.name)
        if field.name != "resume" and value not in kinds and type(value) not in kinds:
            fail(f"--resume {args.resume}: its args.json is damaged ({field.name} is {value!r}); start a new run")
    paths = {name: Path(stored[name]) for name in ("mae_checkpoint",) if stored[name]}
    return type(args)(**{**stored, **paths, "resume": args.resume})


def pick_device(name):
    """The torch.device that `--device` asks for: "auto", "cpu", "cuda" or "cuda:N". Exits with status 2 if absent."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        fail(f"--device {name} is not a device; give auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        fail(f"--device {name} is absent: PyTorch sees {torch.cuda.device_count()} CUDA devices; give auto or cpu")
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(index or 0))


def check_memory(needs, device):
    """Stop with one clear line if what a run will hold, {the flag that sets its size: bytes}, is more than is free.

    Free is the GPU's, or the machine's: a container may have less.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    elif Path("/proc/meminfo").exists():  # Linux: free, and what the system would give back
        free = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable")) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(needs.values()) > free:
        parts = ", ".join(f"{flag} takes {size / 1e9:.1f} GB" for flag, size in needs.items())
        largest = max(needs, key=needs.get)
        fail(f"{largest} is too large: {parts}, and {device} has {free / 1e9:.1f} GB free; give a smaller {largest}")


# ------------------------------------------------------------------------------------------------------- 2. Environment

# Each purpose has random streams of its own, so that evaluating more, say, never changes what training sees.
COLLECT, PRETRAIN, PLAY, ACT, LEARN, EVALUATE = range(6)


def make_envs(args, num_envs):
    """`num_envs` Atari games as one vector environment: uint8 RGB observations (num_envs, 1, H, W, 3), raw rewards.

    Table 9. Seeds go to `reset`. `terminations` is set at every life loss and at the game's end; the game's end is the
    one with `info["lives"] == 0`. After it comes ale-py's autoreset step, which we pre-empt with a seeded reset.
    """
    return gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="vector_entry_point",  # ale-py's AtariVectorEnv; its defaults are not the paper's
        img_height=args.image_size,
        img_width=args.image_size,
        grayscale=False,
        stack_num=1,  # the replay stacks: each frame is then embedded and stored once
        frameskip=4,
        maxpool=True,
        noop_max=30,
        repeat_action_probability=0.0,  # the registered v5 default is 0.25, "sticky actions"
        reward_clipping=False,  # the learner clips; the score stays raw
        max_num_frames_per_episode=args.max_episode_frames,
        full_action_space=False,
        use_fire_reset=True,
        episodic_life=False,  # it would restart the game at each life loss: no second life would ever be seen
        life_loss_info=True,
    )


def game_seeds(seed, *purpose, num=1):
    """`num` independent int64 seeds below 2**31 for a purpose: an array (num,) as `AtariVectorEnv.reset` takes it.

    Consecutive integers would make runs with adjacent seeds share all but one of their evaluation games.
    """
    return np.random.SeedSequence([seed, *purpose]).generate_state(num, np.uint32).astype(np.int64) >> 1


# ------------------------------------------------------------------------------------------------------------- 3. Model


def sincos_positions(dim, side):
    """Fixed 2-D sine-cosine positions (1 + side**2, dim), a row of zeros for [cls] first, then patches row by row.

    The first half of the width encodes the column, the second half the row, each as [sin | cos].
    """
    frequency = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))  # (dim/4,)
    angle = torch.arange(side, dtype=torch.float64)[:, None] * frequency  # (side, dim/4)
    axis = torch.cat([angle.sin(), angle.cos()], 1)  # (side, dim/2)
    column, row = axis.repeat(side, 1), axis.repeat_interleave(side, 0)  # (N, dim/2) each
    return torch.cat([torch.zeros(1, dim, dtype=torch.float64), torch.cat([column, row], 1)]).float()


class PatchEmbed(nn.Module):
    """One linear map a patch, kept as the convolution that it is in ViT so that ViT checkpoints load.

    Its stride is its size, so it is applied here to flat patches: only those that are kept are ever embedded.
    """

    def __init__(self, patch_size, dim):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches):  # (B, T, p*p*3) -> (B, T, D)
        return F.linear(patches, self.proj.weight.permute(0, 2, 3, 1).flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention (B, T, D) -> (B, T, D); `mask` (B, T) is False at tokens that nobody may look at."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def project(self, x):
        """Queries, keys and values of x (B, T, D), each (B, H, T, D/H)."""
        return self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        mask = mask[:, None, None, :] if mask is not None else None
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, H, T, D/H)
        return self.proj(x.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The two-layer perceptron of a Transformer layer."""

    def __init__(self, dim, ratio=4):
        super().__init__()
        self.fc1 = nn.Linear(dim, ratio * dim)
        self.fc2 = nn.Linear(ratio * dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-LN Transformer layer: x' = x + MHSA(LN(x)), z = x' + MLP(LN(x')) (the paper's Background)."""

    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim)

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


def normalize_patches(patches):
    """Eq. (2): each patch (..., p*p*3) minus its own mean, over its own (unbiased) standard deviation."""
    centred = patches - patches.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (patches.shape[-1] - 1)  # on a CPU tensor.var is far slower
    return centred / (variance + 1e-6).sqrt()


def gather_tokens(x, ids):
    """The tokens ids (B, K) of x (B, T, D): (B, K, D)."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[2]))


class MaskedAutoencoder(nn.Module):
    """A small MAE (He et al. 2022; Table 4): a narrow encoder that sees some patches, a wider decoder that paints all.

    Module names are facebookresearch/mae's, so its state dicts load. 790,784 trainable parameters at the paper's sizes.
    """

    def __init__(self, image_size=96, patch_size=8, encoder_dim=64, encoder_depth=3, encoder_heads=4,
                 decoder_dim=128, decoder_depth=3, decoder_heads=8):
        super().__init__()
        self.patch_size, self.side = patch_size, image_size // patch_size
        self.num_patches = self.side**2
        self.patch_embed = PatchEmbed(patch_size, encoder_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, encoder_dim))
        self.register_buffer("pos_embed", sincos_positions(encoder_dim, self.side)[None])  # (1, 1+N, D)
        self.blocks = nn.ModuleList(Block(encoder_dim, encoder_heads) for _ in range(encoder_depth))
        self.norm = nn.LayerNorm(encoder_dim, eps=1e-6)
        self.decoder_embed = nn.Linear(encoder_dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.register_buffer("decoder_pos_embed", sincos_positions(decoder_dim, self.side)[None])
        self.decoder_blocks = nn.ModuleList(Block(decoder_dim, decoder_heads) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, 3 * patch_size**2)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.view(len(module.weight), -1))
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)

    def patchify(self, frames):
        """Flat patches (B, N, p*p*3) of frames (B, H, W, 3), row by row, of the same type."""
        B, p, P = len(frames), self.patch_size, self.side
        return frames.reshape(B, P, p, P, p, 3).transpose(2, 3).reshape(B, P * P, p * p * 3)

    def encode(self, patches, ids, present=None):
        """Encoder outputs (B, 1+K, D), [cls] first, for flat patches (B, K, p*p*3) in [0, 1] at the places ids (B, K).

        Patches where `present` (B, K) is False are looked at by nobody, but look at the others: such a patch that
        repeats another gets the other's row.
        """
        x = self.patch_embed(patches) + self.pos_embed[0, 1:][ids]
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        mask = F.pad(present, (1, 0), value=True) if present is not None else None  # [cls] is always there
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def decode(self, latent, ids):
        """All N patches, normalised as in Eq. (2), (B, N, p*p*3), from encode's output for the patches ids (B, K)."""
        x = self.decoder_embed(latent)  # (B, 1+K, D)
        places = ids[..., None].expand(-1, -1, x.shape[2])
        patches = self.mask_token.expand(len(x), self.num_patches, -1).scatter(1, places, x[:, 1:])
        x = torch.cat([x[:, :1], patches], 1) + self.decoder_pos_embed  # (B, 1+N, D)
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x[:, 1:]))

    def forward(self, frames, mask_ratio=0.75, generator=None):
        """Eq. (1) for uint8 frames (B, H, W, 3): (loss, prediction (B, N, p*p*3), mask (B, N): 0 keep, 1 removed).

        The loss is over all patches, visible and masked. `generator` draws the masks on the frames' device.
        """
        patches = self.patchify(frames).float() / 255
        noise = torch.rand(patches.shape[:2], device=patches.device, generator=generator)
        kept = noise.argsort(1)[:, : int(self.num_patches * (1 - mask_ratio))]  # (B, K), a random subset
        prediction = self.decode(self.encode(gather_tokens(patches, kept), kept), kept)
        loss = F.mse_loss(prediction, normalize_patches(patches))  # Eq. (1), averaged over patches and frames
        return loss, prediction, torch.ones_like(noise).scatter(1, kept, 0.0)


PAPER_MAE_FRAMES = {"ALE/Frostbite-v5": 5_000}  # Table 6; 50,000 for every other game
HELD_OUT_FRAMES = 256  # further frames, never trained on, that watch the loss: those that follow in the same games


def collect_random_frames(args, num_frames, num_envs=8):
    """Frames (num_frames, H, W, 3), a uint8 array, of `num_envs` environments in which random play goes on, game after
    game, each with all its lives. Prints the mean score of the games that ended."""
    envs = make_envs(args, num_envs)
    rng = np.random.default_rng([args.seed, COLLECT])
    games = np.zeros(num_envs, np.int64)  # games finished so far in each environment

    def new_seeds(which):
        return np.concatenate([game_seeds(args.seed, COLLECT, env, games[env]) for env in which])

    observation, _ = envs.reset(seed=new_seeds(range(num_envs)))
    frames = np.empty((num_frames, args.image_size, args.image_size, 3), np.uint8)
    scores, score = [], np.zeros(num_envs)
    for start in tqdm(range(0, num_frames, num_envs), "collecting frames", unit_scale=num_envs, unit="frame"):
        frames[start : start + num_envs] = observation[: num_frames - start, 0]
        actions = rng.integers(envs.single_action_space.n, size=num_envs)
        observation, reward, terminated, truncated, info = envs.step(actions)
        score += reward
        over = (terminated & (info["lives"] == 0)) | truncated  # a mere life loss goes on
        if over.any():
            scores += score[over].tolist()
            score[over] = 0
            games[over] += 1
            observation, _ = envs.reset(seed=new_seeds(np.flatnonzero(over)), options={"reset_mask": over})
    envs.close()
    if scores:
        print(f"random play scored {np.mean(scores):.1f} on average over {len(scores)} whole games")
    return frames


def warmup_cosine(step, steps, peak):
    """Learning rate at a step of `steps`: up in a straight line for a tenth of them, then half a cosine to 0."""
    warmup = steps / 10
    if step < warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def pretrain_mae(args, mae, frames, held_out, device, log, resumed=None, pause=None):
    """Train `mae` in place on uint8 frames (n, H, W, 3) as Table 5 has it; returns the last held-out loss.

    `log(name, value, step)` gets the loss of each step and the held-out loss of each epoch. After each step
    `pause(state, due)` is called; `state()` is what another call needs as `resumed` to go on from there, and `due` asks
    for a checkpoint, at the end of an epoch. Where the loss or the gradient is not finite it asks for one from before
    that step, and exits with status 1.
    """
    frames, held_out = torch.from_numpy(frames), torch.from_numpy(held_out).to(device)
    decayed = [p for p in mae.parameters() if p.ndim > 1]
    others = [p for p in mae.parameters() if p.ndim <= 1]  # biases and LayerNorm
    groups = [{"params": decayed, "weight_decay": args.mae_weight_decay}, {"params": others, "weight_decay": 0.0}]
    peak = args.mae_learning_rate * args.mae_batch_size / 256
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    order = torch.Generator().manual_seed(int(game_seeds(args.seed, PRETRAIN, 0)[0]))
    masks = torch.Generator(device).manual_seed(int(game_seeds(args.seed, PRETRAIN, 1)[0]))
    batches = len(frames) // args.mae_batch_size  # the last, partial batch of an epoch is dropped
    steps, step, held_out_loss = args.mae_epochs * batches, 0, float("nan")
    if resumed:
        mae.load_state_dict(resumed["model"])
        optimizer.load_state_dict(resumed["optimizer"])
        order.set_state(resumed["order"])
        masks.set_state(resumed["masks"])
        step = resumed["step"]
        print(f"going on from step {step} of pre-training")

    def state():
        return {"model": mae.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "order": order_state,
                "masks": masks.get_state()}

    progress = tqdm(total=steps * args.mae_batch_size, desc="pre-training", unit="image", unit_scale=True,
                    initial=step * args.mae_batch_size)
    for epoch in range(step // batches, args.mae_epochs):
        order_state = order.get_state()  # from which this epoch's order is drawn
        shuffled = torch.randperm(len(frames), generator=order)[: batches * args.mae_batch_size]
        for batch in shuffled.split(args.mae_batch_size)[step - epoch * batches :]:
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, steps, peak)
            mask_state = masks.get_state()
            loss, _, _ = mae(frames[batch].to(device), args.mae_mask_ratio, masks)
            optimizer.zero_grad()
            loss.backward()
            value, norm = loss.item(), nn.utils.get_total_norm([p.grad for p in mae.parameters()]).item()
            if not math.isfinite(value + norm):
                masks.set_state(mask_state)
                if pause:
                    with contextlib.suppress(SystemExit):  # of a signal that waits
                        pause(state, due=True)
                sys.exit(f"error: step {step + 1} is not finite (loss {value:.3g}, gradient {norm:.3g}), so "
                         "it is not taken; start anew with a smaller --mae-learning-rate")
            optimizer.step()
            step += 1
            log("mae/loss", value, step)
            progress.update(len(batch))
            if pause and step % batches:
                pause(state, due=False)
        held_out_loss = mae_loss(mae, held_out, args.mae_mask_ratio, args.mae_batch_size)
        log("mae/held_out_loss", held_out_loss, step)
        progress.set_postfix(epoch=epoch + 1, loss=f"{value:.4f}", held_out=f"{held_out_loss:.4f}")
        order_state = order.get_state()
        if pause:
            pause(state, due=args.checkpoint_frequency > 0 or step == steps)
    progress.close()
    return held_out_loss


@torch.no_grad()
def mae_loss(mae, frames, mask_ratio, batch_size):
    """Mean loss on uint8 frames (n, H, W, 3) of the MAE's device, under the same masks at every call."""
    masks = torch.Generator(frames.device).manual_seed(0)
    losses = [mae(batch, mask_ratio, masks)[0] * len(batch) for batch in frames.split(batch_size)]
    return (sum(losses) / len(frames)).item()


# --------------------------------------------------------------------------------------------------------- 4. Selection


def surrounding_patches(side):
    """surr(i, j): for each of the side**2 patches the ids of the 8 around it (5 on an edge, 3 in a corner), a list.

    The paper's formula, read literally, gives the four diagonal ones; its figures and the authors' code have all 8.
    """
    around = []
    for row in range(side):
        for column in range(side):
            rows = range(max(row - 1, 0), min(row + 2, side))
            columns = range(max(column - 1, 0), min(column + 2, side))
            around.append([r * side + c for r in rows for c in columns if (r, c) != (row, column)])
    return around


@torch.no_grad()
def rebuild_from_surroundings(mae, frames):
    """Eq. (3): each patch of uint8 frames (B, H, W, 3) as rebuilt from those around it alone, (B, N, p*p*3)."""
    patches = mae.patchify(frames).float() / 255
    rebuilt = torch.empty_like(patches)
    for position, around in enumerate(surrounding_patches(mae.side)):
        ids = torch.tensor(around, device=frames.device).expand(len(frames), -1)
        rebuilt[:, position] = mae.decode(mae.encode(gather_tokens(patches, ids), ids), ids)[:, position]
    return rebuilt


def reconstruction_error_map(mae, frames):
    """E (B, N), float32, of uint8 frames (B, H, W, 3): how badly each patch is rebuilt from its surroundings.

    The mean squared difference from the patch's normalised pixels, which is what the MAE learned to rebuild (the
    paper's formula compares with raw pixels and sums the colours). The plain definition, one pass of the whole MAE a
    patch; `ErrorMapCache` gives the same values far faster.
    """
    target = normalize_patches(mae.patchify(frames).float() / 255)  # Eq. (2)
    return (rebuild_from_surroundings(mae, frames) - target).square().mean(2)


class ErrorMapCache:
    """`reconstruction_error_map` of a frozen MAE at a speed that makes a run possible: `cache(frames)` -> (B, N).

    A patch's error depends only on its place and on the pixels of the 3x3 patches around it, and an Atari frame shows
    mostly neighbourhoods that were seen before. So errors are remembered in a table from (place, pixels) to error, and
    the MAE runs only on new neighbourhoods, each once, and only as far as the one wanted patch needs:
      - in the first decoder layer most tokens are [mask] + position, the same for every frame: what they say to each
        other is computed once, here in the constructor;
      - in the last decoder layer only the wanted patch asks; its keys and values are folded into its query.
    The values equal the plain ones up to rounding, unless two neighbourhoods share a 64-bit key: for two at one place
    the odds are at most 2**-52 (and not 2**-64: a difference of pixels and the hash's factors may each be even), so
    below 2**-16 that a 100K run (some 3 million neighbourhoods, spread over the places) meets it once.

    The table has `size` entries (13 bytes each) in sets of 8; a new entry replaces the oldest of a full set.
    `behind`, another cache of the same MAE, is asked too and never written to: evaluation reads what training knows
    and keeps its own findings apart. `misses` counts the neighbourhoods that were computed.
    """

    WAYS = 8

    @torch.no_grad()
    def __init__(self, mae, size=2**22, behind=None):
        self.mae, self.behind, self.misses = mae, behind, 0
        device, N = mae.pos_embed.device, mae.num_patches
        self.sets = max(1, size // self.WAYS)
        self.keys = torch.zeros(self.sets, self.WAYS, dtype=torch.int64, device=device)
        self.errors = torch.zeros(self.sets, self.WAYS, device=device)
        self.oldest = torch.zeros(self.sets, dtype=torch.int64, device=device)  # the entry that is replaced next
        rng = np.random.default_rng(0)  # a random linear hash modulo 2**64
        shapes = (3 * mae.patch_size**2,), (3, 3), (mae.side, mae.side)
        factors = (torch.from_numpy(rng.integers(-(2**63), 2**63, shape)).to(device) for shape in shapes)
        self.pixel_factor, self.place_factor, self.place_key = factors

        around = surrounding_patches(mae.side)
        # An edge patch has fewer than 8: its first one is repeated. The repetitions are looked at by nobody and, being
        # the same patch at the same place, end up the same as the first, so writing all of them back does no harm.
        padded = [ids + ids[:1] * (8 - len(ids)) for ids in around]
        self.around = torch.tensor(padded, device=device)  # (N, 8)
        self.present = torch.tensor([[k < len(ids) for k in range(8)] for ids in around], device=device)  # (N, 8)
        self.same = torch.ones(N, 1 + N, dtype=torch.bool, device=device)  # tokens that are [mask] whatever the frame
        self.same[:, 0] = False  # [cls] comes from the encoder
        self.same.scatter_(1, 1 + self.around, False)
        self.x = mae.mask_token + mae.decoder_pos_embed  # (1, T, D), T = 1 + N
        block = mae.decoder_blocks[0]
        self.q, self.k, self.v = block.attn.project(block.norm1(self.x))  # (1, H, T, d) each
        self.mask_score, self.mask_value = self._mask_tokens() if behind is None else (
            behind.mask_score, behind.mask_value)

    def _mask_tokens(self):
        """What the [mask] tokens say in the first decoder layer: scores (N, H, 1, T) and values (N, H, T, d)."""
        # Attention over several keys is attention over one key whose score is their log-sum-exp and whose value is
        # their weighted mean. So all the [mask] tokens of a place act as one key.
        scores = self.q[0] @ self.k[0].transpose(1, 2) * self.q.shape[3] ** -0.5  # (H, T, T)
        score, value = [], []
        for same in self.same:  # for each place
            here = scores.masked_fill(~same, -math.inf)
            score.append(here.logsumexp(2)[:, None])
            value.append(here.softmax(2) @ self.v[0])
        return torch.stack(score), torch.stack(value)

    def hash(self, frames):
        """Keys (B, N), int64, of the 3x3 neighbourhoods of uint8 frames (B, H, W, 3)."""
        patch = (self.mae.patchify(frames) * self.pixel_factor).sum(2)  # (B, N), wraps around at 2**64
        patch = F.pad(patch.unflatten(1, (self.mae.side, -1)), (1, 1, 1, 1))  # (B, P+2, P+2)
        around = patch.unfold(1, 3, 1).unfold(2, 3, 1)  # (B, P, P, 3, 3)
        return ((around * self.place_factor).sum((3, 4)) + self.place_key).flatten(1)

    def __len__(self):
        """Entries in the table."""
        return int((self.keys != 0).sum())

    def state_dict(self):
        """The table and its counter, for a checkpoint."""
        return {name: getattr(self, name) for name in ("keys", "errors", "oldest", "misses")}

    def load_state_dict(self, state):
        """Put back what state_dict returned."""
        for name, value in state.items():
            setattr(self, name, getattr(self, name).copy_(value) if torch.is_tensor(value) else value)

    def lookup(self, keys):
        """(errors (M,), found (M,)) for keys (M,); an error that was not found is 0."""
        sets = keys % self.sets
        match = self.keys[sets] == keys[:, None]  # (M, WAYS)
        return (self.errors[sets] * match).sum(1), match.any(1)

    def insert(self, keys, errors):
        """Remember distinct keys (M,) with their errors (M,)."""
        while len(keys):  # one round but for new keys that share a set: each round stores one of them
            sets = keys % self.sets
            ways = self.oldest[sets]
            self.keys[sets, ways] = keys
            stored = self.keys[sets, ways] == keys
            self.errors[sets[stored], ways[stored]] = errors[stored]
            self.oldest[sets] = (ways + 1) % self.WAYS
            keys, errors = keys[~stored], errors[~stored]

    @torch.no_grad()
    def __call__(self, frames):
        """E (B, N), float32, of uint8 frames (B, H, W, 3) on the MAE's device."""
        keys = self.hash(frames).flatten()  # (B*N,)
        errors, found = self.lookup(keys)
        if self.behind is not None:
            known, there = self.behind.lookup(keys)
            errors, found = torch.where(there, known, errors), found | there
        missing = (~found).nonzero().squeeze(1)
        if len(missing):
            new, inverse = keys[missing].unique(return_inverse=True)  # a neighbourhood seen twice is computed once
            first = torch.full_like(new, len(keys)).scatter_reduce_(0, inverse, missing, "amin")
            patches = self.mae.patchify(frames)  # (B, N, p*p*3)
            computed = torch.cat([self.compute(patches, some) for some in first.split(32)])
            self.insert(new, computed)
            errors[missing] = computed[inverse]
            self.misses += len(new)
        return errors.view(len(frames), -1)

    def compute(self, patches, wanted):
        """Errors (M,) of the wanted (M,) patches, each a frame * N + place, of patches (B, N, p*p*3): Eq. (3)."""
        mae, N = self.mae, self.mae.num_patches
        frame, place = wanted // N, wanted % N
        ids, present = self.around[place], self.present[place]  # (M, 8)
        seen = patches[frame[:, None], ids].float() / 255
        # The encoder's 9 tokens, [cls] and the surroundings, are all that is not [mask] in the decoder.
        changed = mae.decoder_embed(mae.encode(seen, ids, present))  # (M, 9, D)
        tokens = F.pad(1 + ids, (1, 0))  # (M, 9): their places among the decoder's T tokens
        changed = changed + mae.decoder_pos_embed[0][tokens]
        present = F.pad(present, (1, 0), value=True)  # (M, 9)

        # First layer. [mask] tokens look at the other [mask] tokens, as one key, and at the changed ones.
        block = mae.decoder_blocks[0]
        q, k, v = block.attn.project(block.norm1(changed))  # (M, H, 9, d) each
        scores = k @ (self.q * self.q.shape[3] ** -0.5).transpose(2, 3)  # (M, H, 9, T): softmax is slow over short rows
        scores = scores.masked_fill(~present[:, None, :, None], -math.inf)
        weights = torch.cat([self.mask_score[place], scores], 2).softmax(2).transpose(2, 3)  # (M, H, T, 10)
        looked = weights[..., :1] * self.mask_value[place] + weights[..., 1:] @ v  # (M, H, T, d)
        # The changed tokens look at all: the [mask] tokens' keys are the constant ones.
        M = len(wanted)
        keys = torch.cat([self.k.expand(M, -1, -1, -1), k], 2)  # (M, H, T+9, d)
        values = torch.cat([self.v.expand(M, -1, -1, -1), v], 2)
        mask = torch.cat([self.same[place], present], 1)[:, None, None]
        own = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)  # (M, H, 9, d)
        looked = looked.transpose(1, 2).flatten(2)  # (M, T, D)
        places = tokens[..., None].expand(-1, -1, looked.shape[2])
        looked.scatter_(1, places, own.transpose(1, 2).flatten(2))
        x = self.x.expand(M, -1, -1).scatter(1, places, changed)
        x = x + block.attn.proj(looked)
        x = x + block.mlp(block.norm2(x))

        for block in mae.decoder_blocks[1:-1]:
            x = block(x)
        wanted_row = (1 + place)[:, None, None].expand(-1, -1, x.shape[2])
        one = x.gather(1, wanted_row)  # (M, 1, D)
        if len(mae.decoder_blocks) > 1:
            # Last layer, for one query a head. q.(W h + b) = (W^T q).h + a constant, which softmax ignores; and since
            # the weights sum to 1, the mean of W h + b is W (mean of h) + b. So no key or value is ever formed.
            block = mae.decoder_blocks[-1]
            h, H = block.norm1(x), block.attn.heads  # (M, T, D)
            w_q, w_k, w_v = block.attn.qkv.weight.unflatten(0, (3, H, -1))  # (H, d, D) each
            b_q, _, b_v = block.attn.qkv.bias.unflatten(0, (3, H, -1))  # (H, d) each
            q = torch.einsum("mod,hkd->mhk", h.gather(1, wanted_row), w_q) + b_q  # (M, H, d)
            scores = torch.einsum("mhk,hkd->mhd", q, w_k) @ h.transpose(1, 2)  # (M, H, T)
            mean = (scores * w_q.shape[1] ** -0.5).softmax(2) @ h  # (M, H, D)
            looked = torch.einsum("mhd,hkd->mhk", mean, w_v) + b_v  # (M, H, d)
            one = one + block.attn.proj(looked.flatten(1))[:, None]
            one = one + block.mlp(block.norm2(one))
        rebuilt = mae.decoder_pred(mae.decoder_norm(one))[:, 0]  # (M, p*p*3)
        target = normalize_patches(patches[frame, place].float() / 255)
        return (rebuilt - target).square().mean(1)


def select_salient_patches(errors, max_patches, lorenz_slope=0.5):
    """Which patches of each frame to keep, for errors (B, N): (patch_ids (B, max_patches), count (B,)), both int64.

    The first count ids of a row are the selected ones, largest error first, the lower id first among equals.
    Dynamic-K: sort a frame's errors in ascending order and divide by their sum, v_0 ... v_{N-1}. Their running sum
    over x = n/N is the Lorenz curve; it is convex, with the salient patches at its right end. (So is the paper's
    formula; its text says concave.) K = N - i for the i whose two-step slope (v_i + v_{i+1}) N/2 is closest to
    `lorenz_slope` (the smallest such i), among those that keep at least 2 and at most max_patches or N - 1; K = 1 where
    there is none, or all errors are equal. With `lorenz_slope=None` K is max_patches. Raises ValueError unless
    1 <= max_patches <= N.
    """
    B, N = errors.shape
    if not 1 <= max_patches <= N:
        raise ValueError(f"max_patches is {max_patches}; it must be from 1 to the number of patches, {N}")
    patch_ids = errors.sort(dim=1, descending=True, stable=True).indices[:, :max_patches]
    if lorenz_slope is None:
        return patch_ids, torch.full((B,), max_patches, device=errors.device)
    ascending = errors.double().sort(dim=1).values
    v = ascending / ascending.sum(1, keepdim=True)
    slope = (v[:, :-1] + v[:, 1:]) * N / 2  # (B, N-1), of the curve at i = 0 ... N-2
    first = max(1, N - max_patches)
    if first > N - 2:
        return patch_ids, torch.ones(B, dtype=torch.int64, device=errors.device)
    i = first + (slope[:, first:] - lorenz_slope).abs().argmin(1)  # argmin takes the first of equals
    return patch_ids, torch.where(ascending[:, 0] == ascending[:, -1], 1, N - i)


def ratio_to_patches(ratio, num_patches):
    """Patches that a maximal ratio keeps: its share of num_patches, rounded down (but 0.29 of 100 is 29, not 28)."""
    return int(num_patches * ratio + 1e-6)


def ideal_max_ratio(counts, num_patches, coverage=0.999):
    """mr* (Appendix B.5, Fig. 8): the smallest of 5 %, 10 %, ..., 95 % that keeps all salient patches of enough frames.

    `counts` holds K of each frame, uncapped; enough is more than `coverage` of them. 0.95 where no ratio does.
    """
    counts = torch.as_tensor(counts)
    for percent in range(5, 100, 5):
        if (counts <= ratio_to_patches(percent / 100, num_patches)).double().mean() > coverage:
            return percent / 100
    return 0.95


# The adopted ratios of Table 13.
PAPER_MAX_RATIO = {
    "ALE/Frostbite-v5": 0.35,
    "ALE/MsPacman-v5": 0.30,
    "ALE/Seaquest-v5": 0.20,
    "ALE/BattleZone-v5": 0.30,
}
# What the paper's Appendix B.5 finds as mr* in its own pre-training frames (Table 3 prints 1 - mr*).
PAPER_IDEAL_RATIO = {
    "ALE/Frostbite-v5": 0.40,
    "ALE/MsPacman-v5": 0.35,
    "ALE/Seaquest-v5": 0.20,
    "ALE/BattleZone-v5": 0.30,
}


@torch.no_grad()
def count_salient_patches(error_map, frames, lorenz_slope, device, batch_size=64):
    """K of each of the uint8 frames (n, H, W, 3), without a maximum: an int64 tensor (n,) on the CPU."""
    counts = []
    for start in tqdm(range(0, len(frames), batch_size), "salient patches", unit_scale=batch_size, unit="frame"):
        errors = error_map(torch.from_numpy(frames[start : start + batch_size]).to(device))
        counts.append(select_salient_patches(errors, errors.shape[1], lorenz_slope)[1].cpu())
    return torch.cat(counts)


# ----------------------------------------------------------------------------------------------------------- 5. Figures

BLUE, VERMILION, ORANGE = "#0072b2", "#d55e00", "#e69f00"  # told apart by colour-blind readers too


@torch.no_grad()
def decoder_pictures(mae):
    """What the decoder paints without a single patch (Fig. 2, columns 4 to 6), three (N, p*p*3).

    Its patch tokens are [mask] + positions, positions alone, or [mask] alone; [cls] is that of an empty frame.
    """
    nothing = torch.empty(1, 0, dtype=torch.int64, device=mae.pos_embed.device)
    empty = mae.encode(torch.empty(1, 0, 3 * mae.patch_size**2, device=mae.pos_embed.device), nothing)  # (1, 1, D)
    positions = mae.decoder_pos_embed[:, 1:]  # (1, N, D)
    pictures = []
    for tokens in (mae.mask_token + positions, positions, mae.mask_token.expand_as(positions)):
        x = torch.cat([mae.decoder_embed(empty), tokens], 1)
        for block in mae.decoder_blocks:
            x = block(x)
        pictures.append(mae.decoder_pred(mae.decoder_norm(x[:, 1:]))[0])
    return pictures


def paint(patches, side):
    """A picture (H, W, 3) in [0, 1] of normalised patches (N, p*p*3): 0 is grey, 2.5 deviations are black or white."""
    p = math.isqrt(patches.shape[1] // 3)
    picture = patches.unflatten(0, (side, side)).unflatten(2, (p, p, 3)).transpose(1, 2).reshape(side * p, side * p, 3)
    return (0.5 + picture.cpu() / 5).clamp(0, 1).numpy()


def save_figure(figure, path):
    """Write a figure to a PNG file, whole, and forget it."""
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130))
    plt.close(figure)


def draw_reconstruction(mae, frames, path):
    """Fig. 2 for uint8 frames (B, H, W, 3): rebuilt from surroundings, error maps, and what the decoder knows alone.

    Colours are of normalised patches, Eq. (2), so they differ from the frame's.
    """
    rebuilt = rebuild_from_surroundings(mae, frames)
    errors = (rebuilt - normalize_patches(mae.patchify(frames).float() / 255)).square().mean(2)  # (B, N)
    alone = [paint(picture, mae.side) for picture in decoder_pictures(mae)]
    titles = ("frame", "rebuilt from\nsurroundings", "error map\n(brighter: larger)",
              "decoder alone:\n[mask] + positions", "decoder alone:\npositions", "decoder alone:\n[mask]")
    size = (15, 2.55 * len(frames) + 0.7)
    figure, axes = plt.subplots(len(frames), 6, figsize=size, layout="constrained", squeeze=False)
    brightest = errors.max().item()  # one scale for all maps: a bright patch is as salient in one as in another
    for row, frame, patches, error in zip(axes, frames, rebuilt, errors, strict=True):
        error = error.unflatten(0, (mae.side, -1)).cpu()
        for axis, picture in zip(row, [frame.cpu(), paint(patches, mae.side), error, *alone], strict=True):
            shown = axis.imshow(picture, cmap="viridis", vmin=0, vmax=brightest)
            axis.axis("off")
            if picture is error:
                figure.colorbar(shown, ax=axis, shrink=0.8).ax.tick_params(labelsize=12)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=15)
    save_figure(figure, path)


def mark_patches(frame, selected, attended, side, zoom=4):
    """The frame (H, W, 3) enlarged: selected patches in red squares, attended ones in orange and shaded yellow."""
    picture = frame.repeat(zoom, 0).repeat(zoom, 1)
    size = len(picture) // side
    for ids, colour in ((selected, (255, 0, 0)), (attended, (255, 150, 0))):
        for i in ids:
            row, column = i // side * size, i % side * size
            patch = picture[row : row + size, column : column + size]  # a view: what is painted here stays
            if colour != (255, 0, 0):
                patch[:] = (patch * 0.6 + np.array([255, 230, 0]) * 0.4).astype(np.uint8)
            patch[:2], patch[-2:], patch[:, :2], patch[:, -2:] = colour, colour, colour, colour
    return picture


def draw_selection(mae, frames, errors, fixed_ratios, lorenz_slope, path):
    """Fig. 3, a column a frame: the Lorenz curve with dynamic-K's point, its patches, and those of two fixed K."""
    N = mae.num_patches
    patch_ids, count = select_salient_patches(errors, N, lorenz_slope)
    figure, axes = plt.subplots(4, len(frames), figsize=(3.6 * len(frames), 14.5), layout="constrained", squeeze=False)
    for column, (frame, error, ids, k) in enumerate(zip(frames, errors, patch_ids, count.tolist(), strict=True)):
        curve = torch.cat([error.new_zeros(1), error.sort().values.cumsum(0)]).cpu() / error.sum().cpu()  # (N+1,)
        axis = axes[0, column]
        axis.plot(np.arange(N + 1) / N, curve, color=BLUE, linewidth=2.5)
        at = (N - k) / N
        axis.axvline(at, color=VERMILION, linestyle="--", linewidth=2)
        axis.plot(at, curve[N - k], "o", color=VERMILION, markersize=9)
        axis.axline((at, curve[N - k]), slope=lorenz_slope, color=ORANGE, linewidth=2)  # as steep as the curve is there
        axis.set_title(f"slope {lorenz_slope:g}: K = {k}", fontsize=15)
        axis.set_xlabel("share of the patches", fontsize=14)
        axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        axis.tick_params(labelsize=13)
        fixed = [ratio_to_patches(ratio, N) for ratio in fixed_ratios]
        picks = [(f"dynamic-K: {k}", k)] + [(f"fixed K: {kept}", kept) for kept in fixed]
        for axis, (title, kept) in zip(axes[1:, column], picks, strict=True):
            axis.imshow(mark_patches(frame.cpu().numpy(), ids[:kept].tolist(), [], mae.side))
            axis.set_title(title, fontsize=15)
            axis.axis("off")
    axes[0, 0].set_ylabel("share of the error", fontsize=14)
    save_figure(figure, path)


def draw_salient_patches(mae, frames, errors, max_patches, lorenz_slope, path):
    """The patches that the agent would see, in twelve frames."""
    patch_ids, count = select_salient_patches(errors, max_patches, lorenz_slope)
    figure, axes = plt.subplots(3, 4, figsize=(13, 10.4), layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, frame, ids, k in zip(axes.flat, frames, patch_ids, count.tolist()):
        axis.imshow(mark_patches(frame.cpu().numpy(), ids[:k].tolist(), [], mae.side))
        axis.set_title(f"{k} of {mae.num_patches} patches", fontsize=15)
    save_figure(figure, path)


def draw_max_ratio(counts, num_patches, ideal, adopted, title, path):
    """Fig. 8: the histogram of K over frames, in steps of 5 % of the patches, with mr* and the ratio in use."""
    figure, axis = plt.subplots(figsize=(9, 5.4), layout="constrained")
    # The bin that ends at 35 % holds the frames that a maximal ratio of 35 % keeps whole and 30 % does not.
    edges = [0] + [ratio_to_patches(percent / 100, num_patches) for percent in range(5, 101, 5)]
    shares = [((counts > low) & (counts <= high)).double().mean().item() for low, high in zip(edges, edges[1:])]
    axis.bar([percent - 2.5 for percent in range(5, 101, 5)], [100 * share for share in shares], width=4.6, color=BLUE)
    for name, ratio, colour, style in (("mr*", ideal, VERMILION, "-"), ("ratio in use", adopted, ORANGE, "--")):
        whole = (counts <= ratio_to_patches(ratio, num_patches)).double().mean().item()
        label = f"{name}: {100 * ratio:g} %, keeps {100 * whole:.2f} % of the frames whole"
        axis.axvline(100 * ratio, color=colour, linewidth=3, linestyle=style, label=label)
    axis.set_title(title, fontsize=15)
    axis.set_xlabel("salient patches, % of all", fontsize=15)
    axis.set_ylabel("% of the frames", fontsize=15)
    axis.set_xticks(range(0, 101, 10))
    axis.tick_params(labelsize=13)
    figure.legend(fontsize=14, loc="outside lower center")  # beside the bars, never over them
    save_figure(figure, path)


def draw_loss(losses, held_out, path):
    """The pre-training curve: (step, loss) pairs of each step and of the held-out frames at the end of each epoch."""
    figure, axis = plt.subplots(figsize=(9, 5.4), layout="constrained")
    axis.plot(*zip(*losses), color=BLUE, linewidth=1, alpha=0.7, label="training batches")
    axis.plot(*zip(*held_out), color=VERMILION, linewidth=2.5, marker="o", markersize=5, label="held-out frames")
    axis.set_yscale("log")
    axis.set_xlabel("step", fontsize=15)
    axis.set_ylabel("loss, Eq. (1)", fontsize=15)
    axis.tick_params(labelsize=13, which="both")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=14)
    save_figure(figure, path)


# ------------------------------------------------------------------------------------------------------------- 6. Files


def sync(path):
    """Have a file, or the names in a folder, on the disk itself."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def write_whole(path, write):
    """Call `write(temporary_path)`, then rename the file to `path`: it is there whole or not at all.

    Raises OSError, with the path and the reason, where it cannot be written; what was at `path` then still is.
    """
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")  # the ending stays: some writers read the format off it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)  # which has the new name
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk, or a folder that is gone, into the latter
        if "CUDA" in str(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OSError(f"{path} cannot be written ({reason}); make room for it or give it back its folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class Messages:
    """sys.stdout or sys.stderr for a long run: where it cannot be written (a log on a full disk), nothing is lost."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


def one_line_for_files(kind, error, traceback):
    """An excepthook: what went wrong with a file, or no memory, is one line; any other error its traceback."""
    if issubclass(kind, OSError | MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        print(f"error: {(str(error) or kind.__name__).splitlines()[0]}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def write_json(path, content):
    """Write `content` to a JSON file, whole; paths become strings."""
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2, default=str) + "\n"))


def read_checkpoint(path, flag, kind="a checkpoint"):
    """The content of a .pt file, tensors on the CPU, no code run from it. Exits with status 2 if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch.load takes a flipped byte without a word
        if damaged:
            raise ValueError(f"{damaged} in it is damaged")
        with torch.serialization.safe_globals([argparse.Namespace]):  # facebookresearch/mae saves its arguments as one
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # read when it is used
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return content
    except Exception as error:  # a damaged or foreign file can fail in any way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"{flag} {path} is not {kind} ({reason}); give another")


def package_versions():
    """Versions of what a run's numbers depend on, a dict."""
    packages = ("torch", "gymnasium", "ale-py", "numpy")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def cpu_settings():
    """What else the last bits of a run on a CPU depend on, a dict."""
    return {"CPU threads": torch.get_num_threads(), "CPU": torch.backends.cpu.get_cpu_capability()}


class Curves:
    """TensorBoard's event files in a folder. Where they cannot be written a run goes on, with a gap in its curves."""

    def __init__(self, folder):
        self.folder, self.writer = folder, None
        self.flush()

    def add_scalar(self, name, value, step):
        """A point of a curve; it is dropped while the file cannot be written."""
        self.attempt(lambda: self.writer and self.writer.add_scalar(name, value, step))

    def flush(self):
        """Everything to the file: to a new one where the last one failed or its folder is gone."""

        def write():
            if self.writer is None or not self.folder.is_dir():
                self.writer = SummaryWriter(self.folder)
            self.writer.flush()

        self.attempt(write)

    def attempt(self, write):
        """Call `write()`; where that fails there is a warning, and no file until the next flush."""
        try:
            write()
        except OSError as error:  # it comes from TensorBoard's thread, which has ended with it
            print(f"warning: TensorBoard's curves cannot be written ({error}); they get a gap", file=sys.stderr)
            self.writer = None


def save_checkpoint(run_dir, curves, files, content):
    """Write checkpoint.pt with the dict `content`, and how long the event files are at this moment.

    Of `files`, {name: a function that writes it}, what somebody removed is written again. Where any of it cannot be
    written there is a warning, the run goes on, and an earlier checkpoint stands.
    """
    try:
        curves.flush()  # to a new file where the folder is gone
        for name, write in files.items():
            if not (run_dir / name).exists():
                print(f"warning: {run_dir / name} is not there; it is written again", file=sys.stderr)
                write()
        events = {}
        for path in run_dir.glob("events.*"):
            sync(path)
            events[path.name] = path.stat().st_size
        content |= {"script": Path(__file__).stem, "versions": package_versions(), "events": events,
                    "cpu_settings": cpu_settings()}
        write_whole(run_dir / "checkpoint.pt", lambda temporary: torch.save(content, temporary))
    except OSError as error:
        print(f"warning: {error}; an earlier checkpoint, if there is one, stands", file=sys.stderr)


def try_to_write(write):
    """Call `write()`; where a file cannot be written, warn and go on: the run writes it again later."""
    try:
        write()
    except OSError as error:
        print(f"warning: {error}; the run goes on, and tries again later", file=sys.stderr)


def new_run(run_dir, args):
    """Make a run's folder with its args.json in it, both at one instant; returns `lock_run`'s file.

    Exits with status 2 if that is impossible, and then leaves nothing of it.
    """
    fresh = run_dir.with_name(f".{os.getpid()}.{run_dir.name}")
    try:
        write_json(fresh / "args.json", plain_args(args))
        lock = lock_run(fresh)
        os.rename(fresh, run_dir)  # fails where another run was faster
        sync(run_dir.parent)
    except OSError as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or error
        fail(f"--run-name: the new folder {run_dir} cannot be made ({reason}); give another name, or make room for it")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return lock


def lock_run(run_dir):
    """Keep other processes off an unfinished run while this one lives: returns the file that holds the lock.

    Exits with status 2 if another process is at it, or it is finished.
    """
    try:
        lock = open(run_dir / "args.json", "r+")  # to be written, or NFS would not lock it
    except OSError as error:
        fail(f"--resume {run_dir} cannot be written ({error.strerror}); make that possible")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"--resume {run_dir} is a run that is going on in another process; wait for its end, or stop it")
    except OSError:
        pass  # a file system without locks
    if (run_dir / "results.json").exists():
        fail(f"--resume {run_dir} is a finished run: its results.json is there; start a new one")
    return lock


def load_checkpoint(run_dir, args, device):
    """The content of an unfinished run's checkpoint.pt, {} where it had none yet.

    Exits with status 2 if it is damaged, or of another script, other arguments, versions or kind of device: the run
    would go on differently. Only the last bits differ with another CPU or number of threads: that is a warning.
    """
    path = run_dir / "checkpoint.pt"
    if not path.exists():
        print(f"{run_dir} has no checkpoint yet: the run begins anew")
        return {}
    content = read_checkpoint(path, "--resume")
    here = {"script": Path(__file__).stem, "device_type": device.type, **plain_args(args), **package_versions()}
    there = {"script": content.get("script"), "device_type": content.get("device_type")}
    for part in ("args", "versions"):
        there |= content[part] if isinstance(content.get(part), dict) else {}
    for name, value in here.items():
        if there.get(name) != value:
            fail(f"--resume {run_dir}: its checkpoint.pt has {name} {there.get(name)}, and this is {value}; resume "
                 f"with what started it")
    then = content["cpu_settings"] if isinstance(content.get("cpu_settings"), dict) else {}
    for name, value in cpu_settings().items():
        if device.type == "cpu" and then.get(name) != value:
            print(f"warning: {name}: {then.get(name)} when the run stopped, {value} now; it goes on, but not bit for "
                  "bit as it would have", file=sys.stderr)
    return content


def cut_curves(run_dir, events):
    """Cut off what TensorBoard got after the checkpoint with these `events`, for it will come again.

    What is left of files that were being written is swept up too.
    """
    for file in run_dir.glob("events.*"):
        if file.name in events:
            os.truncate(file, min(events[file.name], file.stat().st_size))
        else:
            file.unlink()
    for file in run_dir.rglob(".[0-9]*.*"):
        file.unlink()


class Signals:
    """SIGINT and SIGTERM: `number` holds the one that waits for the step in progress, and 0 while there is none.

    While `at_once` is true, as at first, and at the second signal, they end the program where it stands.
    """

    def __init__(self):
        self.number, self.at_once, self.run_dir = 0, True, None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        waiting, self.number = self.number, number
        if self.at_once or waiting:
            self.stop(number)

    def stop_at_once(self):
        """From here on they end the program where it stands; one that waits does so now."""
        self.at_once = True
        if self.number:
            self.stop(self.number)

    def stop(self, number):
        """End the program, with the way to go on where there is a run."""
        if self.run_dir:
            with contextlib.suppress(OSError):  # no print: the signal may have come in the middle of one
                os.write(2, f"\nstopped; go on with --resume {self.run_dir}\n".encode())
        sys.exit(128 + number)


def mae_sizes(args):
    """The arguments of MaskedAutoencoder that `args` asks for, a dict."""
    return {"image_size": args.image_size, "patch_size": args.patch_size, "encoder_dim": args.encoder_dim,
            "encoder_depth": args.encoder_depth, "encoder_heads": args.encoder_heads, "decoder_dim": args.decoder_dim,
            "decoder_depth": args.decoder_depth, "decoder_heads": args.decoder_heads}


def plain_args(args):
    """`args` as a dict of plain values, which `torch.load(weights_only=True)` and JSON both take; without --resume.

    Paths are absolute, since a run may be resumed from another folder.
    """
    return {name: str(value.absolute()) if isinstance(value, Path) else value for name, value in vars(args).items()
            if name != "resume"}


def save_mae(path, mae, args, salient_counts):
    """Write mae.pt: model, sizes, env_id, args (of the run that writes it), and salient_counts.

    The last is a dict of K of the pre-training frames (`counts`; of the paper's games perhaps not of each frame) and
    the slope they were counted at (`lorenz_slope`), or None where nobody counted: without them a game that is not one
    of the paper's four needs --max-ratio.
    """
    content = {"model": mae.state_dict(), "sizes": mae_sizes(args), "env_id": args.env_id, "args": plain_args(args),
               "salient_counts": salient_counts}
    write_whole(path, lambda temporary: torch.save(content, temporary))


def load_mae(path, mae, args):
    """Load a checkpoint into `mae` in place; returns its `salient_counts`, or None. Exits with status 2 if it is wrong.

    Takes mae.pt and what facebookresearch/mae and the authors' code save: {"model": state dict, "args": Namespace}.
    """
    content = read_checkpoint(path, "--mae-checkpoint", "a MAE checkpoint")
    try:
        state = content["model"]
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        sizes = dict(content.get("sizes", {}))
        salient_counts = content.get("salient_counts")
        if salient_counts is not None:
            salient_counts = {"counts": salient_counts["counts"].clone(),  # the file may change
                              "lorenz_slope": salient_counts["lorenz_slope"]}
    except Exception as error:  # a damaged or foreign file can fail in any way
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fail(f"--mae-checkpoint {path} is not a MAE checkpoint ({reason}); give a mae.pt")
    if content.get("env_id", args.env_id) != args.env_id:
        fail(f"--mae-checkpoint {path} is of {content['env_id']}; give --env-id {content['env_id']} or another file")
    for name, value in sizes.items():
        if value != mae_sizes(args).get(name):
            fail(f"--mae-checkpoint {path} has {name} {value}; give --{name.replace('_', '-')} {value}")
    wanted = {name: tuple(value.shape) for name, value in mae.state_dict().items()}
    for name in wanted | shapes:
        if shapes.get(name) != wanted.get(name):
            fail(f"--mae-checkpoint {path}: {name} is {shapes.get(name, 'missing')} there and "
                 f"{wanted.get(name, 'missing')} here; give the size flags that it was trained with")
    mae.load_state_dict(state)
    return salient_counts


# -------------------------------------------------------------------------------------------------------------- 7. Main


def keep_freed_memory():
    """Have glibc (Linux's C library) keep the memory that is freed, for the next step.

    By default it gives large pieces back to the system, and each step waits until they have come again, page by page:
    some three tenths of the time of DE-Rainbow's update, a ninth of the error map's. It keeps up to 1 GiB that is
    free. Elsewhere this does nothing.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: only larger ones are apart from the heap
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes that the heap may have free


if __name__ == "__main__":
    sys.stdout, sys.stderr = (Messages(stream or open(os.devnull, "w")) for stream in (sys.stdout, sys.stderr))
    sys.excepthook = one_line_for_files
    # TensorBoard's thread: where it fails to write, Curves says so.
    threading.excepthook = lambda failed: issubclass(failed.exc_type, OSError) or threading.__excepthook__(failed)
    signals = Signals()
    args = parse_args()
    check_args(args)
    device = pick_device(args.device)
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    num_frames = args.mae_frames or PAPER_MAE_FRAMES.get(args.env_id, 50_000)
    all_patches = (args.image_size // args.patch_size) ** 2
    on_host = {"--mae-frames": (num_frames + HELD_OUT_FRAMES) * args.image_size**2 * 3}
    on_device = {"--error-cache-size": args.error_cache_size * 13,
                 "--image-size": 8 * all_patches * (all_patches + 1) * args.decoder_dim}  # ErrorMapCache's
    check_memory(on_host | on_device if device.type == "cpu" else on_host, torch.device("cpu"))
    check_memory(on_device, device)
    seconds = defaultdict(float)  # wall seconds by phase

    @contextlib.contextmanager
    def clock(phase):
        start = time.perf_counter()
        yield
        seconds[phase] += time.perf_counter() - start

    game_name = args.env_id.removeprefix("ALE/").removesuffix("-v5")
    name = args.run_name or f"{game_name}__{Path(__file__).stem}__{args.seed}__{int(time.time())}"
    run_dir = args.resume or Path("runs") / name
    lock = lock_run(run_dir) if args.resume else None
    checkpoint = load_checkpoint(run_dir, args, device) if args.resume else {}

    torch.manual_seed(args.seed)
    with torch.device(device):
        mae = MaskedAutoencoder(**mae_sizes(args))
    if args.mae_checkpoint:  # only look
        load_mae(args.mae_checkpoint, mae, args)

    if not args.resume:
        lock = new_run(run_dir, args)
    print(f"device {device}, {torch.get_num_threads()} CPU threads, run folder {run_dir}")
    files = {"args.json": lambda: write_json(run_dir / "args.json", plain_args(args))}  # what --resume needs
    signals.run_dir = run_dir
    seconds.update(checkpoint.get("seconds", {}))

    print("part      parameters")  # Table 4
    for part, prefixes in (("encoder", ("patch_embed", "blocks", "norm")), ("decoder", ("decoder_",)),
                           ("[cls]", ("cls_token",)), ("[mask]", ("mask_token",)), ("total", ("",))):
        print(f"{part:8s}  {sum(p.numel() for n, p in mae.named_parameters() if n.startswith(prefixes)):,}")

    # Frames of random play; 256 more of them watch the loss.
    with clock("collect"):
        frames = collect_random_frames(args, num_frames + HELD_OUT_FRAMES)
    frames, held_out = frames[:num_frames], frames[num_frames:]

    losses = checkpoint.get("losses", {"mae/loss": [], "mae/held_out_loss": []})  # (step, loss)
    if args.resume:
        cut_curves(run_dir, checkpoint.get("events", {}))
    if not args.mae_checkpoint:
        curves = Curves(run_dir)

        def log(name, value, step):
            losses[name].append((step, value))
            curves.add_scalar(name, value, step)

        def pause(state, due):
            """Save a checkpoint if one is due or a signal waits, and end the run if one does."""
            seconds["pretrain"] = time.perf_counter() - pretraining_began - seconds["checkpoint"]
            number = signals.number  # one that comes later waits for the next pause
            if due or number:
                with clock("checkpoint"):
                    content = {"pretraining": state(), "losses": losses, "seconds": dict(seconds)}
                    content |= {"args": plain_args(args), "device_type": device.type}
                    save_checkpoint(run_dir, curves, files, content)
            if number:
                signals.stop(number)

        signals.at_once = False
        pretraining_began = time.perf_counter() - seconds["pretrain"] - seconds["checkpoint"]  # as if uninterrupted
        pretrain_mae(args, mae, frames, held_out, device, log, checkpoint.get("pretraining"), pause)
        signals.stop_at_once()
        curves.flush()
    mae.eval().requires_grad_(False)
    try_to_write(lambda: save_mae(run_dir / "mae.pt", mae, args, None))  # what took long is safe before anything else

    # How many patches of each frame are salient, and what maximal ratio would keep them all.
    error_map = ErrorMapCache(mae, args.error_cache_size)
    with clock("count salient patches"):
        counts = count_salient_patches(error_map, frames, args.lorenz_slope, device)

    def save_counted():
        save_mae(run_dir / "mae.pt", mae, args, {"counts": counts, "lorenz_slope": args.lorenz_slope})

    try_to_write(save_counted)
    ideal = ideal_max_ratio(counts, mae.num_patches, args.coverage)
    max_ratio = args.max_ratio if args.max_ratio is not None else PAPER_MAX_RATIO.get(args.env_id, ideal)
    kept_whole = {percent: (counts <= ratio_to_patches(percent / 100, mae.num_patches)).double().mean().item()
                  for percent in range(5, 100, 5)}

    # The figures: frames spread over the random play.
    with clock("draw"):
        spread = np.linspace(0, len(frames) - 1, 12).astype(int)
        some = torch.from_numpy(frames[spread]).to(device)  # (12, H, W, 3)
        errors = error_map(some)
        figures = run_dir / "figures"
        draw_reconstruction(mae, some[1::3], figures / "mae_reconstruction.png")
        draw_selection(mae, some[2::4], errors[2::4], (max_ratio, max_ratio / 2), args.lorenz_slope,
                       figures / "salient_selection.png")
        draw_salient_patches(mae, some, errors, ratio_to_patches(max_ratio, mae.num_patches), args.lorenz_slope,
                             figures / "salient_patches.png")
        draw_max_ratio(counts, mae.num_patches, ideal, max_ratio,
                       f"{game_name}: {num_frames:,} frames, slope {args.lorenz_slope:g}", figures / "max_ratio.png")
        if losses["mae/loss"]:
            draw_loss(losses["mae/loss"], losses["mae/held_out_loss"], figures / "loss.png")

    # The report.
    images = len(losses["mae/loss"]) * args.mae_batch_size
    quantiles = {f"{q}%": int(np.percentile(counts, q)) for q in (0, 5, 25, 50, 75, 95, 100)}
    results = {
        "env_id": args.env_id, "method": "mae", "seed": args.seed, "args": plain_args(args),
        "frames": num_frames, "steps": len(losses["mae/loss"]),
        "held_out_losses": [value for _, value in losses["mae/held_out_loss"]],  # at the end of each epoch
        "final_loss": float(np.mean([value for _, value in losses["mae/loss"][-50:]])) if images else None,
        "images_per_second": images / seconds["pretrain"] if images else None,
        "K": {"mean": counts.double().mean().item(), **quantiles}, "lorenz_slope": args.lorenz_slope,
        "ideal_max_ratio": ideal, "paper_ideal_max_ratio": PAPER_IDEAL_RATIO.get(args.env_id), "max_ratio": max_ratio,
        "kept_whole": kept_whole, "misses_per_frame": error_map.misses / num_frames, "seconds": dict(seconds),
        "device": str(device), "threads": torch.get_num_threads(),
        "versions": package_versions(),
    }
    save_counted()  # again, if it could not be written before
    write_json(run_dir / "results.json", results)
    signals.run_dir = None  # there is nothing left to go on with
    (run_dir / "checkpoint.pt").unlink(missing_ok=True)
    if images:
        print(f"{images} images, {results['images_per_second']:.0f} a second; loss {results['final_loss']:.4f}, on "
              f"held-out frames {results['held_out_losses'][-1]:.4f}")
    print("ratio " + " ".join(f"{percent:5d}%" for percent in kept_whole))
    print("whole " + " ".join(f"{share:6.1%}" for share in kept_whole.values()) + "  of the frames")
    paper = f", the paper's is {PAPER_IDEAL_RATIO[args.env_id]:.0%}" if args.env_id in PAPER_IDEAL_RATIO else ""
    print(f"K: {results['K']}")
    print(f"mr* at coverage {args.coverage:g}: {ideal:.0%}, which keeps {kept_whole[round(100 * ideal)]:.2%} of the "
          f"frames whole{paper}; see {run_dir}/figures")
