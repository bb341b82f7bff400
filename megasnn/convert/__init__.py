"""What tools/convert_checkpoint.py does: checkpoints and weights of any format, read and written tensor by tensor."""
