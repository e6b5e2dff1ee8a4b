"""Arithmetic on paper: what a training run should cost, and how much of a device's peak it reached."""

from torchledger.analytic import napkin as napkin
