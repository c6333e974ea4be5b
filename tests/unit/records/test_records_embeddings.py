"""Numbers derived from the counts of word vectors."""

import vector_records


def test_a_word_is_found_as_one_of_its_forms_or_built():
    facts = vector_records.subset_facts(num_exact=1, num_lower=20, num_capitalised=300, num_built=4000)
    assert facts.num_found == 4321


def test_all_of_a_file_is_four_bytes_a_number():
    assert vector_records.vector_file(num_words=10, dimension=3).num_full_bytes == 120
