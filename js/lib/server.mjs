// Requests to the pack's routes. A refusal becomes an Error whose message is the server's sentence.

import { said } from "./server_zh.mjs";

export const PREFIX = "/hybrid_trt";
const HEADERS = { "X-Hybrid-TRT": "1" };

/**
 * Ask one of the pack's routes.
 * @param {{fetchApi: (path: string, options?: object) => Promise<Response>}} api ComfyUI's api
 * @param {string} path below PREFIX
 * @param {{method?: string, json?: unknown}} [options] `json` is what to send
 * @returns {Promise<any>} the answer's JSON
 * @throws {Error} with one sentence for the user, and a `status` where the server answered
 */
export async function request(api, path, { method = "GET", json } = {}) {
    const headers = { ...HEADERS, ...(json === undefined ? {} : { "Content-Type": "application/json" }) };
    let response;
    try {
        response = await api.fetchApi(PREFIX + path, { method, headers, body: json === undefined ? undefined : JSON.stringify(json) });
    } catch {
        throw new Error("ComfyUI's server does not answer, so nothing was done; start it and try again.");
    }
    const answer = await response.json().catch(() => ({}));
    const words = answer.error ?? `The server answered ${response.status} to ${path}; see its log.`;
    if (!response.ok) throw Object.assign(new Error(said(words)), { status: response.status });
    return answer;
}
