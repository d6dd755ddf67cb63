"""TLT inside other programs. `switch` puts TLT into every vLLM engine that a program builds."""
