// What of a status stands in its box, and what is folded away under "Details".

const LINES = 2, WIDTH = 84;

/** Han and its like are twice as wide as letters. */
const width = (letter) => (letter.codePointAt(0) > 0x2e7f ? 2 : 1);

/** The start of a text that is too long for two rows, cut between words; a shorter text as it is. */
function start(text) {
    let room = WIDTH, end = 0;
    for (const letter of text) {
        room -= width(letter);
        if (room < 0) break;
        end += letter.length;
    }
    if (room >= 0) return text;
    const space = text.lastIndexOf(" ", end);
    return `${text.slice(0, space > end / 2 ? space : end).trimEnd()} …`;
}

/**
 * The lines that are shown, and all that these do not say in full.
 * @param {string[]} lines
 * @returns {{shown: string[], rest: string[]}}
 */
export function fold(lines) {
    const shown = lines.slice(0, LINES).map(start);
    return { shown, rest: [...lines.slice(0, LINES).filter((line, i) => line !== shown[i]), ...lines.slice(LINES)] };
}
