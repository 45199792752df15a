"""CEL rules of custom resources: read, checked, priced when a CRD is written, evaluated when an object is."""
