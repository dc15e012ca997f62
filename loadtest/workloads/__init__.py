"""Seeded workloads with the token structure of real traffic: `generating.generate`."""
