"""Names, reasons and the TrainingJob model: what users and other programs see."""
