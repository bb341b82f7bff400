"""Reports of a run: log lines, progress, TensorBoard, memory, timers and spike statistics."""
