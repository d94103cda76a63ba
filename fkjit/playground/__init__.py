"""`fkjit playground`: a page on this machine to edit, compile, check and compare kernels.

    server   uvicorn on 127.0.0.1, the address with its token
    app      routes; who may call them (guard)
    jobs     worker processes: started ahead, killed on an edit, past a time limit
    worker   one of them: a request on stdin, events on stdout
    stages   a variant goes through them: source, machine code, PTX, checks

The page itself is static/; editor/ is the source of static/editor.js.
"""
