"""DomainBed's network for MNIST."""

from __future__ import annotations

import torch
from torch import nn


class MnistCnn(nn.Module):
    """The network ``MNIST_CNN`` of DomainBed (Gulrajani and Lopez-Paz 2021; MIT), ``domainbed/networks.py``.

    Four 3 × 3 convolutions, of 64, 128, 128 and 128 channels and the second of stride 2, each followed by
    ReLU and normalisation in 8 groups; the mean of the last is the representation. The tensors have
    DomainBed's names, so that its checkpoints can be loaded.

    Parameters
    ----------
    width
        Width of the representation. DomainBed has 128; for another a linear layer is added.
    """

    own_width = 128
    side = 28
    """Side of MNIST's pictures."""

    def __init__(self, width: int = own_width) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 64, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(128, 128, 3, padding=1)
        self.conv4 = nn.Conv2d(128, 128, 3, padding=1)
        self.bn0 = nn.GroupNorm(8, 64)
        self.bn1, self.bn2, self.bn3 = (nn.GroupNorm(8, 128) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)
        self.reset_classifier(width)

    def reset_classifier(self, width: int) -> None:
        """Change the width of the representation; a linear layer to it is random."""
        self.num_classes = width
        layer = nn.Identity() if width == self.own_width else nn.Linear(self.own_width, width)
        self.fc: nn.Module = layer

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """(B, width) representations of pictures (B, C, H, W) in [0, 1].

        The first two channels are seen: red and green, which ``ncm data colored-mnist`` paints.
        """
        features = self.bn0(self.relu(self.conv1(pictures[:, :2])))
        # In this layout the wider convolutions, and in the other one normalisation, take half the time.
        features = features.contiguous(memory_format=torch.channels_last)
        for convolution, normalise in (
            (self.conv2, self.bn1),
            (self.conv3, self.bn2),
            (self.conv4, self.bn3),
        ):
            features = normalise(self.relu(convolution(features)))
        representation: torch.Tensor = self.fc(features.mean((2, 3)))
        return representation
