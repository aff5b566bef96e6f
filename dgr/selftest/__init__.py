"""Tests of this machine: its kernels, on small models that are written for the purpose."""
