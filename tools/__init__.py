"""The command lines beside training; each file, or folder, is a program."""
