// What of a status stands in its box, and what is folded away under "Details".

/** Rows of the box, "Details" among them, and letters of a row in a node of the usual width. */
const ROWS = 4, WIDTH = 42;

/** Han and its like are twice as wide as letters. */
const widthOf = (text) => [...text].reduce((sum, letter) => sum + (letter.codePointAt(0) > 0x2e7f ? 2 : 1), 0);

/** The start of a text that has no room, cut between words. */
function start(text, room) {
    let end = 0, left = room;
    for (const letter of text) {
        left -= widthOf(letter);
        if (left < 0) break;
        end += letter.length;
    }
    const space = text.lastIndexOf(" ", end);
    return `${text.slice(0, space > end / 2 ? space : end).trimEnd()} …`;
}

/**
 * The lines that have room in the box, and the others. A line is cut only where it is the first and has no room alone.
 * @param {string[]} lines
 * @returns {{shown: string[], rest: string[]}}
 */
export function fold(lines) {
    const rows = lines.map((line) => Math.max(1, Math.ceil(widthOf(line) / WIDTH)));
    let room = ROWS - rows.reduce((sum, count) => sum + count, 0);
    if (room >= 0) return { shown: lines, rest: [] };
    room = ROWS - 1;
    const last = rows.findIndex((count) => (room -= count) < 0);
    return last === 0 ? { shown: [start(lines[0], (ROWS - 1) * WIDTH)], rest: lines } : { shown: lines.slice(0, last), rest: lines.slice(last) };
}
