// What the server is asked by HTTP. The token stays in this tab, and travels in a header alone.

const TOKEN = "unicron.token";

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

export function keepToken(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(15_000) });
  } catch {
    throw new Refused(0, "The console does not answer. Is it running, and is this machine still connected to it?");
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, body?.error || `The console answered ${answer.status}.`);
  return body;
}

const headers = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

export const get = (path) => ask(path, { headers: headers() });

export const post = (path, body) =>
  ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
  });

/** A path of which each piece may hold any character. */
export const path = (...pieces) => `/${pieces.map(encodeURIComponent).join("/")}`;
