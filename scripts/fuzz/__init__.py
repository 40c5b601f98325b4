"""Give mutated models to `Trainer`, and mutated checkpoints to `Trainer.load`: each must work or
raise an onnxfit error.

    python scripts/fuzz [--cases 10000] [--first 0]
    python scripts/fuzz --case 1234 [--out case.onnx]

The number of a case determines the case, so that it can be run again. The modules, in the order of
a run:

- `models` and `checkpoints` make the undamaged files;
- `byte_mutations`, `model_mutations` and `checkpoint_mutations` damage them;
- `batch` draws random data of the shapes that a damaged model declares;
- `case` puts these together, and names the outcome;
- `processes` runs cases in child processes with bounded memory, and says what ended a child.

A mutation added to a tuple of mutations changes the cases behind every number: note in the change
which numbers were of interest.
"""
