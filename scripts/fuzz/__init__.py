"""Give damaged and hostile files to onnxfit: models, checkpoints, data, options. Each must work or
raise an onnxfit error, within 4 GB and 20 seconds; it may change nothing but the files that its user
named, and run no code.

    python scripts/fuzz [--cases 8000] [--first 0] [--kind npz]
    python scripts/fuzz --case 1234 [--out case.onnx]

The number of a case determines the case, so that it can be run again. The modules, in the order of
a run:

- `originals` makes the undamaged files, of which `models` and `data` have the contents;
- `kinds` has a module for each kind of file: how it is damaged, and what a user does with it.
  `attempt` is their base class;
- `byte_mutations`, `model_mutations` and `checkpoint_mutations` are the damage that they share;
- `sandbox` makes a folder for a case, with decoys inside and outside, and watches over them;
- `batch` draws random data of the shapes that a damaged model declares, and `commands` calls the
  command line;
- `case` puts these together, and names the outcome;
- `processes` runs cases in child processes with bounded memory, and says what ended a child.

`ranks` is a program of its own: random trainings on several ranks, compared with one process.

A mutation added to a tuple of mutations changes the cases behind every number, and so does a kind:
note in the change which numbers were of interest. Without pyarrow or Pillow, cases of their files
are skipped.
"""
