"""Names, reasons and the TrainingJob model: what users and other programs see. Holds no behaviour of the operator."""
