// What of a status stands in its box, and what is folded away under "Details".

const STEP = 10;

/** The start of a text, cut between words. */
function start(text, letters) {
    const kept = text.slice(0, letters), space = kept.lastIndexOf(" ");
    return `${kept.slice(0, space > letters / 2 ? space : letters).trimEnd()} …`;
}

/**
 * Draw the lines that have room, and fold the others. A line is cut only where it is the first and has no room alone.
 * @param {string[]} lines
 * @param {(shown: string[], rest: string[]) => boolean} draw draws, and tells whether that has room
 */
export function fold(lines, draw) {
    for (let count = lines.length; count > 0; count -= 1) if (draw(lines.slice(0, count), lines.slice(count))) return;
    for (let letters = (lines[0]?.length ?? 0) - STEP; letters > STEP; letters -= STEP)
        if (draw([start(lines[0], letters)], lines)) return;
    if (!lines.length) draw([], []);
}
