"""Checkpoints of global tensors that any layout can load.

folder.py           a run's checkpoints on disk: which one to load, which one is the best, which ones go
lock.py             one run for each folder, and the job that wrote it
format.py           metadata.json: progress, and each tensor's boxes in files
tensor_io.py        safetensors files: written by boxes, checked, and read where a rank's part overlaps them
optimizer_state.py  optimizer state as global tensors
save.py             one save over all ranks. writer.py: a run's saves, at once or in the background
load.py             one load over all ranks. fit.py: whether model, optimizer and tensors fit
reshard.py          the same tensors in the files of another layout
source.py           a checkpoint or a weight file, opened by a tool. weight_file.py: files of other programs
exchange.py         weights to and from other programs, descriptions and comparisons for people
"""
