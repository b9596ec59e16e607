"""What a training takes of the machine, told before anything is loaded: no file of this room imports torch."""
