"""GiGPO training of text agents: advantages, losses, a sharded actor, checkpoints, evaluation, imitation."""
