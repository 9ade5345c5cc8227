// Reads from the server. A session that has ended goes back to the sign-in form; everything else is an Error with the
// server's own words.

const TIMEOUT_MS = 20000;

async function call(path, options) {
  const answer = await fetch("/dashboard/" + path, { ...options, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 401) {
    location.reload();
    throw new Error("The session has ended.");
  }
  const shape = await answer.json();
  if (!answer.ok) {
    const text = shape?.error?.message || `the server answered ${answer.status}`;
    throw Object.assign(new Error(text.charAt(0).toUpperCase() + text.slice(1)), { status: answer.status });
  }
  return shape;
}

export const read = (name, args = {}) => {
  const kept = Object.entries(args).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return call(`data/${name}?${new URLSearchParams(kept)}`, { headers: { accept: "application/json" } });
};

export const command = (path) => call(path, { method: "POST", headers: { accept: "application/json" } });
