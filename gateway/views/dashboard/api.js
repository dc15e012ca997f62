// Requests to the gateway that this page came from. The admin key is a header, and lives as long as the tab.

const KEY = "ropeway-admin-key";

export const adminKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function bearer(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The gateway's own words where it answers with an error. */
export async function errorOf(response) {
  const text = await response.text();
  try {
    return new ApiError(response.status, JSON.parse(text).error.message);
  } catch {
    return new ApiError(response.status, text.slice(0, 300) || `status ${response.status}`);
  }
}

/** The JSON answer of an operator's route. Throws ApiError. */
export async function call(method, path, body) {
  const headers = { ...bearer(adminKey.get()), "content-type": "application/json" };
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new ApiError(0, "The gateway cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

/** The data of each server-sent event of a response, as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      const lines = buffer.slice(0, end).split("\n");
      buffer = buffer.slice(end + 2);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
