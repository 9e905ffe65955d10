"""Places of the tokens of a step."""

from ....jit import compiled_for


@compiled_for("i8:2 i8:2")
def place_rows(rows, places):
    """
    Place the tokens of rows as if all drafts were chains.

    Args:
        rows (int64 `[rows, 3]`): The line at which each row starts, the column of its first token, and the number of
            its tokens.
        places (int64 `[6, tokens]`): Filled for every token: the line at which its row starts, its index within the
            row, its column, its position, the end of the columns that it attends to, and its line.
    """
    token = 0
    for row in range(len(rows)):
        line, column, num_tokens = rows[row]
        for query in range(num_tokens):
            places[0, token], places[1, token], places[2, token] = line, query, column + query
            places[3, token], places[4, token] = column + query, column + query + 1
            places[5, token] = line + column + query
            token += 1
