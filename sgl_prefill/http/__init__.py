"""HTTP side: label scoring on the OpenAI routes, request checks, and answers that say what was wrong."""
