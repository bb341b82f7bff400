"""What megasnn-convert-checkpoint does: checkpoints and weights of any format, read and written tensor by tensor."""
