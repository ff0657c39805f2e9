"""The recipe: a configuration becomes a run directory. `train.py` is the loop; this is what it stands on."""
