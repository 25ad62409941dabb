// Differences of two answers, and of two distributions of which only the most likely tokens are known. Pure functions.

const TOP = 5; // most likely tokens per position of a report
const MOST_ALIGNED = 2000; // tokens per side; the alignment takes 2 bytes per pair of tokens
const ROUNDING = 1e-5; // largest error of the sums below, because logprobs are in float32

/** Return the index of the first token that differs or exists on one side only; null if there is none. */
export function divergence(a, b) {
  const shorter = Math.min(a.length, b.length);
  for (let i = 0; i < shorter; i++) if (a[i] !== b[i]) return i;
  return a.length === b.length ? null : shorter;
}

/** Return for each token of `a` and of `b` whether it is outside of their longest common subsequence. After
 *  `MOST_ALIGNED` tokens from the first difference on, all tokens count as different. */
export function differing(a, b) {
  const flags = [a, b].map(({ length }) => new Array(length).fill(false));
  const start = divergence(a, b);
  if (start === null) return flags;
  const rows = Math.min(a.length - start, MOST_ALIGNED);
  const columns = Math.min(b.length - start, MOST_ALIGNED);
  const wide = columns + 1;
  const longest = new Uint16Array((rows + 1) * wide); // length for the tokens from row i and column j on
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      const same = a[start + i] === b[start + j];
      longest[i * wide + j] = same
        ? longest[(i + 1) * wide + j + 1] + 1
        : Math.max(longest[(i + 1) * wide + j], longest[i * wide + j + 1]);
    }
  }
  flags[0].fill(true, start);
  flags[1].fill(true, start);
  for (let i = 0, j = 0; i < rows && j < columns; ) {
    if (a[start + i] === b[start + j]) flags[0][start + i++] = flags[1][start + j++] = false;
    else if (longest[(i + 1) * wide + j] >= longest[i * wide + j + 1]) i++;
    else j++;
  }
  return flags;
}

/** Return a lower bound of KL(P‖Q) in nats. `p` and `q` map some tokens to their logprobs.
 *
 *  Let S be the tokens in both maps, and let f map each token outside of S to one symbol, the rest. By the data
 *  processing inequality, KL(f(P)‖f(Q)) ≤ KL(P‖Q). The left side needs only the logprobs of S, because the rest has
 *  the probability 1 - P(S). For the rest, this is the log-sum inequality: the sum of p log(p/q) outside of S is at
 *  least P(rest) log(P(rest)/Q(rest)). That term decreases in Q(rest). The bound therefore stays valid if the
 *  rounding error is added to Q(rest) and subtracted from the result. */
export function klLowerBound(p, q) {
  let sum = 0;
  let restP = 1;
  let restQ = 1;
  for (const [token, logprob] of p) {
    const other = q.get(token);
    if (other === undefined) continue;
    const probability = Math.exp(logprob);
    sum += probability * (logprob - other);
    restP -= probability;
    restQ -= Math.exp(other);
  }
  if (restP > 0) sum += restP * Math.log(restP / (Math.max(restQ, 0) + ROUNDING));
  return Math.max(sum - ROUNDING, 0); // a KL divergence is never negative
}

// ---- the report of a live comparison -----------------------------------------------------------------------

/** Return the text that each token adds. The last token of a split character has all of it. `entries` are of
 *  `logprobs.content`. */
function pieces(entries) {
  const decoder = new TextDecoder();
  const texts = entries.map(({ bytes, token }) =>
    bytes.length ? decoder.decode(Uint8Array.from(bytes), { stream: true }) : token,
  );
  if (texts.length) texts[texts.length - 1] += decoder.decode();
  return texts;
}

/** Return the tokens of an entry of `prompt_logprobs` as [id, text, logprob], most likely first. */
function ranked(entry) {
  const tokens = Object.entries(entry).map(([id, { logprob, decoded_token: text }]) => [Number(id), text ?? id, logprob]);
  return tokens.sort((one, two) => two[2] - one[2] || one[0] - two[0]);
}

function position(token, piece, entries) {
  const lists = entries.map(ranked);
  const [p, q] = lists.map((list) => new Map(list.map(([id, , logprob]) => [id, logprob])));
  const own = entries.map((entry) => entry[token]);
  return {
    token,
    piece,
    text: own[0].decoded_token ?? String(token),
    kl: klLowerBound(p, q),
    logprobs: own.map(({ logprob }) => logprob),
    ranks: own.map(({ rank }) => rank),
    entropies: null, // they need the full distributions
    same_top: lists[0][0][0] === lists[1][0][0],
    top: lists.map((list) => list.slice(0, TOP)),
  };
}

/** Return a quantile of sorted numbers, with linear interpolation. */
function quantile(sorted, part) {
  const at = part * (sorted.length - 1);
  const low = sorted[Math.floor(at)];
  return low + (at % 1) * (sorted[Math.ceil(at)] - low);
}

function summary(positions) {
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const kl = positions.map((found) => found.kl).sort((one, two) => one - two);
  const shifts = positions.map(({ logprobs: [a, b] }) => Math.exp(b) - Math.exp(a));
  return {
    positions: positions.length,
    mean_kl: mean(kl),
    median_kl: quantile(kl, 0.5),
    p90_kl: quantile(kl, 0.9),
    p99_kl: quantile(kl, 0.99),
    max_kl: kl.at(-1),
    same_top: mean(positions.map((found) => Number(found.same_top))),
    rms_probability_change: Math.sqrt(mean(shifts.map((shift) => shift ** 2))),
    perplexity: [0, 1].map((side) => Math.exp(-mean(positions.map(({ logprobs }) => logprobs[side])))),
  };
}

/** Return a report in the form of `forge-jax compare --json`, with lower bounds in place of the divergences.
 *
 *  `sides` are two objects with `model`, `options` (the request's fields), and an answer's `promptIds`, `ids`,
 *  `entries`, `text` and `reason`. `scores` has the `prompt_logprobs` of A's answer after each side's prompt. */
export function liveReport({ sides, scores, prompt, alternatives, version, date }) {
  const [a, b] = sides;
  const texts = pieces(a.entries);
  const starts = sides.map(({ promptIds }) => promptIds.length);
  const positions = a.ids.map((token, i) => {
    const entries = scores.map((list, side) => list[starts[side] + i]);
    return position(token, texts[i], entries);
  });
  const apart = divergence(a.ids, b.ids);
  return {
    format: "forge-jax-comparison",
    version: 1,
    forge_jax: version,
    date,
    sides: sides.map(({ model, options }, i) => ({
      name: "AB"[i],
      label: label(model, options),
      model,
      options,
      weight_bytes: null,
      vocab_size: null,
    })),
    settings: {
      scored: "answers",
      chat: true,
      max_tokens: null, // each side has its own sampling settings, in its options
      temperature: null,
      seed: null,
      kl_lower_bound: true,
      top_logprobs: alternatives,
    },
    summary: { ...summary(positions), prompts: 1, same_answers: Number(apart === null) },
    prompts: [{
      prompt,
      prompt_tokens: a.promptIds.length,
      answers: sides.map(({ text, reason, ids, entries }) => ({
        text,
        finish_reason: reason,
        tokens: ids,
        pieces: pieces(entries),
      })),
      divergence: apart,
      positions,
    }],
  };
}

const label = (model, options) =>
  [model, ...Object.entries(options).map(([name, value]) => `${name}=${JSON.stringify(value)}`)].join(" ");
