"""Read batches ahead of the step that trains them, in processes of torch's DataLoader."""
