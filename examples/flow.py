"""The models of `train_from_cache.py`: an autoencoder for small images, and a flow model of its latents."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT_DIM = 64
LATENT = (4, 4, 4)
CROP_DIM = 3  # whether a latent was mirrored, and from where it was cut


class AutoEncoder(nn.Module):
    """Images `[B, 1, 32, 32]` in [-1, 1] <-> latents `[B, 4, 4, 4]`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 8, 4, 2), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(2 * width, LATENT[0], 3, 1, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(LATENT[0], 2 * width, 3, 1, 1), nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 8, 4, 2),
        )  # fmt: skip


class FlowBlock(nn.Module):
    """A residual layer that the conditioning scales, shifts and gates."""

    def __init__(self, width: int, cond_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(cond_width, 3 * width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, hidden: Tensor, cond: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(cond).chunk(3, dim=-1)
        return hidden + gate * self.layers(self.norm(hidden) * (1 + scale) + shift)


class Flow(nn.Module):
    """The velocity of a latent at time `t`, given text states `[B, tokens, dim]`, a pooled state and how it was cut out.

    The last, `[B, 3]` in [0, 1], lets it train on latents that were mirrored and cut at random, and draw none that are: the
    micro-conditioning of SDXL (Podell et al., 2023).
    """

    def __init__(self, width: int = 320, cond_width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(math.prod(LATENT), width)
        self.query = nn.Linear(width, cond_width)
        self.key_value = nn.Linear(TEXT_DIM, 2 * cond_width)
        self.pooled = nn.Linear(TEXT_DIM + CROP_DIM, cond_width)
        self.time = nn.Sequential(nn.Linear(64, cond_width), nn.SiLU(), nn.Linear(cond_width, cond_width))
        self.blocks = nn.ModuleList(FlowBlock(width, cond_width) for _ in range(depth))
        self.leave = nn.Linear(width, math.prod(LATENT))
        self.register_buffer("frequencies", torch.logspace(0, 2.3, 32))

    def forward(self, latent: Tensor, t: Tensor, text: Tensor, pooled: Tensor, crop: Tensor) -> Tensor:
        hidden = self.enter(latent.flatten(1))
        key, value = self.key_value(text).chunk(2, dim=-1)
        words = F.scaled_dot_product_attention(self.query(hidden)[:, None], key, value)[:, 0]
        angles = t[:, None] * self.frequencies
        cond = self.pooled(torch.cat([pooled, crop], dim=-1)) + self.time(
            torch.cat([angles.sin(), angles.cos()], dim=-1)
        )
        cond = F.silu(words + cond)
        for block in self.blocks:
            hidden = block(hidden, cond)
        return self.leave(hidden).view_as(latent)
