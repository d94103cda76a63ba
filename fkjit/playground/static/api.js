// Calls of the server; the address of the page has the token, so paths stay relative.

export async function get(path) {
  return answer(await fetch(path));
}

export async function post(path, body) {
  return answer(await fetch(path, request(body)));
}

/** Calls `each(event)` for the events of a run as they come; an aborted run just ends. */
export async function run(body, each, signal) {
  const response = await fetch("api/run", { ...request(body), signal });
  if (!response.ok) {
    const { error } = await response.json();
    each({ event: "error", which: "a", stage: "request", text: error, marks: [] });
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) each(JSON.parse(part.slice("data: ".length)));
  }
}

function request(body) {
  return {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
}

async function answer(response) {
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}
