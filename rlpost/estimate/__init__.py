"""What a training needs of the machine, estimated before anything is loaded: no file here imports torch."""
