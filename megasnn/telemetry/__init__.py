"""What a run says about itself: log lines, progress, TensorBoard, memory, timers and spike statistics."""
