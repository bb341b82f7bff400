"""What a run reports: log lines, progress, TensorBoard, memory, timers and spike statistics."""
