"""WMRL: reinforcement learning that lets a world model predict most outcomes and corrects it with a few real ones."""
